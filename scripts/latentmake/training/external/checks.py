"""Checks of command lines against an external program's sources.

Another machine cannot be asked, and the program itself need not lie here: what cannot be known is a
warning, what its sources refuse has failed. Nothing here imports torch: planning runs these checks.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from latentmake.files.paths import is_windows
from latentmake.training.checks import Finding
from latentmake.training.external.arguments import missing_files
from latentmake.training.external.installation import Installation

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
