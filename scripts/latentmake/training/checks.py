"""Checks that every external trainer shares, and the checklist they are shown in.

A finding is `failed` where the training would surely end or learn from the wrong files, `warning`
where that depends. Nothing here imports torch or reads tensors: planning runs these checks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from tabulate import tabulate

from latentmake.config import SdTrainer
from latentmake.errors import TrainingError
from latentmake.training.external.arguments import missing_files
from latentmake.training.external.installation import Installation
from latentmake.training.result import CHECKPOINT_WEIGHTS

__all__ = [
    "Finding",
    "Verdict",
    "accelerate_config",
    "checklist",
    "environment",
    "failed",
    "flags",
    "of_faults",
    "own",
    "passed",
    "paths",
    "refuse_failed",
]

Verdict = Literal["ok", "warning", "failed"]
_PACKAGES = {"adamw8bit": "bitsandbytes", "xformers": "xformers"}
_SHOWN = 3  # faults of one check that are named


class Finding(NamedTuple):
    """One line of the checklist: subject, verdict, reason."""

    what: str
    verdict: Verdict
    note: str


def checklist(findings: Iterable[Finding]) -> str:
    """Return the checklist as a table, a verdict each."""
    return tabulate(
        [[each.what, each.verdict, each.note] for each in findings],
        headers=["checked", "verdict", "note"],
        disable_numparse=True,
        colalign=["left"] * 3,
    )


def failed(findings: Iterable[Finding]) -> bool:
    """Tell whether any finding has failed."""
    return any(finding.verdict == "failed" for finding in findings)


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Refuse if a finding has failed.

    Raises:
        TrainingError: names the findings that have.
    """
    lines = [f"{each.what}: {each.note}" for each in findings if each.verdict == "failed"]
    if lines:
        raise TrainingError(f"{len(lines)} of the checklist failed: {' | '.join(lines)}")


def of_faults(what: str, faults: Iterable[str], sound: str) -> Finding:
    """Return a finding that has failed if there are faults; the first ones are named."""
    found = list(faults)
    if not found:
        return Finding(what, "ok", sound)
    rest = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Finding(what, "failed", "; ".join(found[:_SHOWN]) + rest)


def flags(
    installation: Installation, arguments: Sequence[str], script: str | None = None
) -> Finding:
    """Check that a trainer's script knows all flags of a command line, from its sources.

    Args:
        installation: the trainer's.
        arguments: of the command line.
        script: which of its scripts; by default the one that trains.
    """
    what = "arguments" if script is None else f"arguments of {script}"
    missing = installation.missing_flags(arguments, script)
    if missing:
        known = installation.sources_of(script or installation.program.script).flags or ()
        near = [guess for flag in missing for guess in get_close_matches(flag, known, 1, 0.8)]
        hint = f"did you mean {' '.join(near)}?" if near else "update it, or leave that out"
        note = f"this {installation.program.name} does not know {' '.join(missing)}: {hint}"
        return Finding(what, "failed", note)
    return Finding(what, "ok", "it knows all flags, as far as its sources tell")


def paths(arguments: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Warn of files that the user's own arguments name and that are nowhere.

    Args:
        arguments: the user's own, as the configuration has them.
        folder: the trainer's, in which it runs.
    """
    for name in missing_files(arguments, folder):
        note = f"{name} is neither in the project's folder nor in {folder}: correct the path"
        yield Finding("arguments", "warning", note)


def accelerate_config(path: str | None) -> Iterator[Finding]:
    """Check that accelerate's configuration file exists, where one is set."""
    if path is not None and not Path(path).is_file():
        yield Finding(
            "accelerate_config", "failed", f"{path} does not exist: correct `accelerate_config`"
        )


def own(trainer: SdTrainer, *, here: bool = True) -> Iterator[Finding]:
    """Check what our own trainer's settings need.

    Args:
        trainer: its settings.
        here: whether it is trained in this environment, so that packages can be looked for.
    """
    asked = [
        _PACKAGES[each] for each in (trainer.optimizer, trainer.attention) if each in _PACKAGES
    ]
    missing = [package for package in asked if here and find_spec(package) is None]
    faults = (f"{package} is not installed, which these settings need" for package in missing)
    yield of_faults("environment", faults, "has what these settings need")
    yield from accelerate_config(trainer.accelerate_config)
    begun = trainer.resume_from_checkpoint
    if begun is not None and not Path(begun, CHECKPOINT_WEIGHTS).is_file():
        note = f"{begun} is no checkpoint: name a folder such as runs/NAME/checkpoints/step-000500"
        yield Finding("resume_from_checkpoint", "failed", note)


def environment(installation: Installation, packages: Iterable[str] = ()) -> Finding:
    """Check that the trainer's environment has what its script imports; nothing is imported.

    Args:
        installation: the trainer's.
        packages: what these settings need besides.

    Raises:
        TrainingError: its Python cannot be run.
    """
    needs = {*installation.sources.needs, *packages}
    there = installation.can_import(sorted(needs | {"accelerate"}))
    python = installation.python
    if missing := sorted(name for name in needs if not there[name]):
        note = f"{python} lacks {', '.join(missing)}: install it there"
        # A script that looks elsewhere for its modules may well find them there.
        verdict: Verdict = "warning" if installation.sources.extends_path else "failed"
        return Finding("environment", verdict, note)
    if not there["accelerate"]:
        note = f"{python} has no accelerate: the script is run without it"
        return Finding("environment", "warning", note)
    return Finding("environment", "ok", f"{python} has all that its script imports")


def passed(findings: Iterable[Finding], say: Callable[[str], object]) -> None:
    """Show a checklist, and refuse if a finding has failed.

    Raises:
        TrainingError: names the findings that have.
    """
    found = list(findings)
    say(checklist(found))
    refuse_failed(found)
