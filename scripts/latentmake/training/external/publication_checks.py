"""Checks of a publication: what its scripts and TOML files say, against the trainer's sources.

The trainer's machine cannot be asked, and the trainer itself need not lie here: what cannot be
known is a warning, what its sources refuse has failed. Nothing is written and no package imported,
so that planning runs these checks too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from latentmake.errors import TrainingError
from latentmake.files.paths import System, is_windows
from latentmake.training.checks import Finding, Verdict, flags, of_faults, paths
from latentmake.training.external.installation import Installation
from latentmake.training.external.launch_scripts import Commands
from latentmake.training.external.publish import Names

__all__ = ["SYSTEMS", "attention", "elsewhere", "findings"]

SYSTEMS: tuple[System, ...] = ("linux", "windows")


def findings(
    *,
    commands: Mapping[System, Commands],
    tomls: Mapping[System, str],
    names: Names,
    folder: str,
    find: Callable[[], Installation],
    further: Sequence[str],
    accelerate_config: str | None,
) -> Iterator[Finding]:
    """Check the text files of a published folder, a finding each.

    Args:
        commands: what the script of each system does.
        tomls: the dataset TOML of each system.
        names: asked for all paths of both.
        folder: the trainer's, as the configuration has it.
        find: finds the trainer in that folder.
        further: the user's own arguments.
        accelerate_config: path of accelerate's configuration file, if any.
    """
    program = commands["linux"].program
    tuner: Installation | None = None
    if Path(folder).expanduser().is_dir():
        try:
            tuner = find()
            yield Finding(program, "ok", str(tuner.folder))
        except TrainingError as error:
            yield Finding(program, "failed", str(error))
    else:
        note = f"{folder} is not on this machine: its flags and keys cannot be checked"
        yield Finding(program, "warning", note)
    if tuner is not None:
        for script, arguments in _calls(commands["linux"]):
            try:
                tuner.script(script)
                yield flags(tuner, arguments, script)
            except TrainingError as error:
                yield Finding(f"arguments of {script}", "failed", str(error))
        yield from paths(further, tuner.folder)
    if accelerate_config is not None and not Path(accelerate_config).is_file():
        yield elsewhere("accelerate_config", accelerate_config)
    for system in SYSTEMS:
        keys = None if tuner is None else tuner.sources.dataset_keys
        yield _toml(f"dataset TOML for {system.capitalize()}", tomls[system], keys)
    yield from _names(names)


def attention(asked: str, known: Iterable[str], program: str, chosen: bool) -> Finding:
    """Check the attention of the trainer's machine.

    Args:
        asked: its name.
        known: those that the trainer has.
        program: the trainer's name.
        chosen: whether the user named it.
    """
    if asked not in known:
        note = f"{program} has no {asked}: set `publish.attention` to one of {', '.join(known)}"
        return Finding("attention", "failed", note)
    if asked == "sdpa":
        hint = "" if chosen else ", which every machine has; `publish.attention` names another"
        return Finding("attention", "ok", f"{asked}{hint}")
    return Finding("attention", "ok", f"{asked}, which the trainer's machine must have")


def elsewhere(what: str, place: str) -> Finding:
    """Return the finding for a file missing on this machine."""
    if is_windows(place) or Path(place).is_absolute():
        return Finding(what, "ok", f"{place}: not on this machine, taken as it is")
    note = f"{place} does not exist here: correct it, or name the path on the trainer's machine"
    return Finding(what, "warning", note)


def _calls(commands: Commands) -> Iterator[tuple[str, Sequence[str]]]:
    for step in commands.steps:
        if step.arguments is not None:
            yield step.script, step.arguments
    yield commands.script, commands.training


def _toml(what: str, text: str, known: Collection[str] | None) -> Finding:
    blocks = tomllib.loads(text)
    sections = [blocks["general"], *blocks["datasets"]]
    sections += [subset for block in blocks["datasets"] for subset in block.get("subsets", [])]
    keys = sorted({key for section in sections for key in section} - {"subsets"})
    return of_faults(what, _key_faults(keys, known), _number(blocks["datasets"]))


def _key_faults(keys: Iterable[str], known: Collection[str] | None) -> Iterator[str]:
    for key in keys:
        if known is not None and key not in known:
            near = get_close_matches(key, known, 1, 0.8)
            hint = f"did it mean {near[0]}?" if near else "update the trainer"
            yield f"`{key}` is not a key that it knows; {hint}"


def _number(blocks: Sequence[Any]) -> str:
    return "1 dataset" if len(blocks) == 1 else f"{len(blocks)} datasets"


def _names(names: Names) -> Iterator[Finding]:
    """Report folders without a name on a system: its script cannot run.

    Failed where that holds for both systems, so that neither script can.
    """
    told = {system: [*names.unnamed(system)] for system in SYSTEMS}
    verdict: Verdict = "failed" if all(told.values()) else "warning"
    for system, lines in told.items():
        what = f"paths for {system.capitalize()}"
        if not lines:
            yield Finding(what, "ok", "each has a name there")
        for line in lines:
            yield Finding(what, verdict, line)
