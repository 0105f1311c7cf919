"""Command lines of external trainers, the user's own arguments, and their checks by its sources.

The trainer runs in a folder of its own, where a path relative to the project means nothing.

Another machine cannot be asked, and the program itself need not lie here: what cannot be known is a
warning, what its sources refuse has failed. Nothing here imports torch: planning runs these checks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from latentmake.config.architectures import Setting
from latentmake.files.workspace import is_windows
from latentmake.training.backend import Finding
from latentmake.training.external.installation import Installation
from latentmake.training.external.order import ExternalOrder

# Learning-rate schedules that know no end: they go on rightly whatever number of steps is left.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"})
_Order = TypeVar("_Order", bound=ExternalOrder)

# Endings of files that trainers read.
_READ = (
    *(".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin"),
    *(".toml", ".json", ".yaml", ".yml", ".txt"),
)


def command_line(options: Mapping[str, Setting]) -> list[str]:
    """Return the arguments for some flags with their values.

    True gives the flag alone, None and False give nothing, a list each of its values; numbers have
    the shortest text that reads as the same number.
    """
    found: list[str] = []
    for flag, value in options.items():
        if value is None or value is False:
            continue
        found.append(flag)
        if isinstance(value, list):
            found += value
        elif isinstance(value, str):
            found.append(value)
        elif value is not True:
            found.append(str(int(value)) if value == int(value) else repr(value))
    return found


def accelerate_arguments(
    precision: str, *, processes: int | None = None, config: str | None = None
) -> list[str]:
    """Return the arguments between `accelerate launch` and the training script.

    Args:
        precision: number format in which it computes.
        processes: how many devices train together; None leaves it to accelerate.
        config: path of accelerate's configuration file, which then says all of it.
    """
    if config is not None:
        return ["--config_file", config]
    options: dict[str, str | float | bool | None] = {"--mixed_precision": precision}
    if processes is not None:
        options |= {"--num_processes": processes, "--num_machines": 1, "--dynamo_backend": "no"}
        options |= {"--multi_gpu": processes > 1}
    return command_line(options)


def absolute(path: Path | str) -> str:
    """Return an absolute path; links stay."""
    return os.path.abspath(path)  # noqa: PTH100


def with_paths(arguments: Sequence[str], named: Callable[[str], str] = str) -> list[str]:
    """Return arguments with each path in them made absolute, and `named` as another system does.

    A value is a path if it has a slash, an ending or a `~` and exists, seen from the working
    directory. An absolute path may lie on another machine. In `--flag=value` and `key=value` the
    part behind counts.
    """
    found = []
    for each in arguments:
        before, value = _split(each)
        place = _place(value) or (value if _is_absolute(value) else None)
        found.append(f"{before}{named(place)}" if place else each)
    return found


def located(order: _Order, named: Callable[[str], str] = str) -> _Order:
    """Return an order with the paths in the user's own arguments resolved; see `with_paths`."""
    further = with_paths(order.trainer.arguments, named)
    trainer = order.trainer.model_copy(update={"arguments": further})
    keys = ("latents_arguments", "text_arguments")
    own = {key: with_paths(getattr(order.model, key), named) for key in keys}
    model = order.model.model_copy(update=own)
    return order.model_copy(update={"trainer": trainer, "model": model})


def depends_on_length(arguments: Sequence[str], schedule: str = "constant") -> bool:
    """Whether the learning rate depends on the number of steps, which differs after a resume.

    `schedule` is the one that is set besides the user's own arguments.
    """
    values = [*arguments, ""]
    given = dict(_split(x) if "=" in x else (x + "=", values[i + 1])
                 for i, x in enumerate(arguments) if x.startswith("--"))  # fmt: skip
    if given.get("--lr_scheduler_type="):
        return False  # its own numbers are part of the state
    if "." in given.get("--lr_warmup_steps=", "") or "." in given.get("--lr_decay_steps=", ""):
        return True  # shares of all steps
    return given.get("--lr_scheduler=", schedule).partition(":")[0] not in _ENDLESS


def missing_files(arguments: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield values that look like files and are nowhere; the trainer runs in `folder`."""
    for each in arguments:
        value = _split(each)[1]
        named = value.endswith(_READ) and "://" not in value and " " not in value
        if named and _place(value) is None and not _exists(folder / value):
            yield value


def _split(argument: str) -> tuple[str, str]:
    """Return what stands up to an equals sign, and the value behind it."""
    key, equals, value = argument.partition("=")
    return (f"{key}=", value) if equals and not _exists(argument) else ("", argument)


def _exists(path: Path | str) -> bool:
    """Whether a path exists; one that is too long for the system does not."""
    return os.path.exists(path)  # noqa: PTH110


def _is_absolute(value: str) -> bool:
    """Whether a value is an absolute path; a letter with a colon alone is no drive here."""
    return value.startswith("/") or (is_windows(value) and len(value) > len("C:"))


def _place(value: str) -> str | None:
    """Return the absolute path that a value means; None if it is none."""
    path = os.path.expanduser(value)  # noqa: PTH111 -- Path would drop "./"
    looks = path != value or os.sep in value or bool(Path(value).suffix)
    if value.startswith("-") or not looks:
        return None
    return absolute(path) if _exists(path) else None


PROVEN = {"musubi_tuner": "30c658c", "sd_scripts": "48d368f"}
"""Section of the configuration -> commit of the program with which all tests passed."""


def flags(
    installation: Installation, arguments: Sequence[str], script: str | None = None
) -> Finding:
    """Check that a script, by default the one that trains, knows all flags of a command line."""
    what = "arguments" if script is None else f"arguments of {script}"
    if missing := installation.missing_flags(arguments, script):
        near = installation.near(missing, script)
        hint = f"did you mean {near}?" if near else "update it, or leave that out"
        note = f"this {installation.program.name} does not know {' '.join(missing)}: {hint}"
        return Finding(what, "failed", note)
    return Finding(what, "ok", "it knows all flags, as far as its sources tell")


def paths(arguments: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Warn of files that the user's own arguments name and that are nowhere."""
    for name in missing_files(arguments, folder):
        note = f"{name} is neither in the project's folder nor in {folder}: correct the path"
        yield Finding("arguments", "warning", note)


def environment(installation: Installation, packages: Iterable[str] = ()) -> Finding:
    """Check that the program's environment has what its script imports, and further packages.

    Raises:
        TrainingError: its Python cannot be run.
    """
    needs, python = {*installation.sources.needs, *packages}, installation.python
    lacks = installation.lacking({*needs, "accelerate"})
    if missing := [name for name in lacks if name in needs]:
        note = f"{python} lacks {', '.join(missing)}: install it there"
        return Finding("environment", "failed", note)
    if lacks:
        note = f"{python} has no accelerate: the script is run without it"
        return Finding("environment", "warning", note)
    return Finding("environment", "ok", f"{python} has all that its script imports")


def proven_commit(section: str, folder: Path) -> Finding:
    """Compare the commit of a program with the one that is proven; another is never an error.

    An update may rename a flag or change what a script writes, so that a report of a fault begins
    with the commit.

    Args:
        section: of the configuration, a name in `PROVEN`.
        folder: the program's.
    """
    proven = PROVEN[section]
    git = ("git", "-C", str(folder))
    if not (folder / ".git").exists():
        what = "no git repository, so its commit is unknown"
        return Finding("commit", "warning", f"{what}; {proven} is proven")
    if not (found := said(*git, "rev-parse", "HEAD")):
        return Finding("commit", "warning", f"git does not tell its commit; {proven} is proven")
    edits = " with local changes" if said(*git, "diff", "--stat", "HEAD") else ""
    is_proven = found.startswith(proven)
    word = "proven" if is_proven else f"not proven; {proven} is"
    note = f"commit {found[:12]}{edits} ({word})"
    return Finding("commit", "ok" if is_proven and not edits else "warning", note)


def said(*command: str) -> str:
    """Return what a program prints; "" where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return "" if done.returncode else done.stdout.strip()
    return ""


def elsewhere(what: str, place: str) -> Finding:
    """Return the finding for a file missing on this machine."""
    if is_windows(place) or Path(place).is_absolute():
        return Finding(what, "ok", f"{place}: not on this machine, taken as it is")
    note = f"{place} does not exist here: correct it, or name the path on the trainer's machine"
    return Finding(what, "warning", note)
