"""The commit of an external trainer, beside the one with which all tests passed.

An update of a trainer may rename a flag or change what its scripts write, so a report of a fault
begins with its commit. Another commit than the proven one is never an error.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

PROVEN = {"musubi_tuner": "30c658c", "sd_scripts": "48d368f"}
"""Section of the configuration -> commit of the program with which all tests passed."""
_SECONDS = 30


class Commit(NamedTuple):
    """What is installed: whether it is the proven commit, and a note."""

    proven: bool
    note: str


def installed(section: str, folder: Path) -> Commit:
    """Return the commit of a trainer's folder.

    Args:
        section: of the configuration, a name in `PROVEN`.
        folder: the program's.
    """
    proven = PROVEN[section]
    if not (folder / ".git").exists():
        return Commit(False, f"no git repository, so its commit is unknown; {proven} is proven")
    found = _said(folder, "rev-parse", "HEAD")
    if not found:
        return Commit(False, f"git does not tell its commit; {proven} is proven")
    edited = bool(_said(folder, "diff", "--stat", "HEAD"))
    sound = found.startswith(proven) and not edited
    word = "proven" if found.startswith(proven) else f"not proven; {proven} is"
    return Commit(sound, f"commit {found[:12]}{' with local changes' * edited} ({word})")


def _said(folder: Path, *words: str) -> str:
    """Return what git prints about a folder; "" where it is missing or fails."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()
