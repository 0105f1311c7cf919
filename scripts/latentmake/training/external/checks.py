"""Checks of command lines against an external program's sources.

Another machine cannot be asked, and the program itself need not lie here: what cannot be known is a
warning, what its sources refuse has failed. Nothing here imports torch: planning runs these checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from latentmake.files.paths import is_windows
from latentmake.training.checks import Finding
from latentmake.training.external import commit
from latentmake.training.external.arguments import missing_files
from latentmake.training.external.installation import Installation


def flags(
    installation: Installation, arguments: Sequence[str], script: str | None = None
) -> Finding:
    """Check that a script, by default the one that trains, knows all flags of a command line."""
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
    """Warn of files that the user's own arguments name and that are nowhere."""
    for name in missing_files(arguments, folder):
        note = f"{name} is neither in the project's folder nor in {folder}: correct the path"
        yield Finding("arguments", "warning", note)


def environment(installation: Installation, packages: Iterable[str] = ()) -> Finding:
    """Check that the program's environment has what its script imports; nothing is imported.

    Args:
        installation: the program's.
        packages: further ones that the settings need.

    Raises:
        TrainingError: its Python cannot be run.
    """
    needs = {*installation.sources.needs, *packages}
    there = installation.can_import(sorted(needs | {"accelerate"}))
    python = installation.python
    if missing := sorted(name for name in needs if not there[name]):
        note = f"{python} lacks {', '.join(missing)}: install it there"
        return Finding("environment", "failed", note)
    if not there["accelerate"]:
        note = f"{python} has no accelerate: the script is run without it"
        return Finding("environment", "warning", note)
    return Finding("environment", "ok", f"{python} has all that its script imports")


def proven_commit(installation: Installation) -> Iterator[Finding]:
    """Compare the program's commit with the one that is proven, where one is."""
    section = installation.program.section
    if section in commit.PROVEN:
        found = commit.installed(section, installation.folder)
        yield Finding("commit", "ok" if found.proven else "warning", found.note)


def elsewhere(what: str, place: str) -> Finding:
    """Return the finding for a file missing on this machine."""
    if is_windows(place) or Path(place).is_absolute():
        return Finding(what, "ok", f"{place}: not on this machine, taken as it is")
    note = f"{place} does not exist here: correct it, or name the path on the trainer's machine"
    return Finding(what, "warning", note)
