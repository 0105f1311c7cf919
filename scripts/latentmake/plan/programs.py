"""Programs and weights that encoded, by the digests in recipes.

A recipe holds one digest of all sources of a program that encodes in place of our encoders, and one
of each network's weights. A small file for each such digest says which sources they were, or where
the weights lay, so that a plan can name what changed. They can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from latentmake.errors import StorageError
from latentmake.files import atomic

_FOLDER = Path(".latentmake/programs")
_DIGEST = re.compile(r"[0-9a-f]+")


class Program(NamedTuple):
    """Sources of a program, or weights.

    Attributes:
        name: of the program; of weights their path.
        files: none of weights; path below its folder -> digest of the content.
    """

    name: str
    files: Mapping[str, str]


def keep(digest: str, name: str, files: Mapping[str, str]) -> None:
    """Keep what a digest stands for, unless it is kept already."""
    path = _FOLDER / f"{digest}.json"
    if _DIGEST.fullmatch(digest) and not path.exists():
        data = json.dumps({"name": name, "files": dict(files)}, indent=1, sort_keys=True)
        with contextlib.suppress(OSError, StorageError):  # a plan goes on without
            atomic.write(path, data.encode())


def program_of(digest: str) -> Program | None:
    """Return the sources that a digest stands for; None where they were not kept."""
    if not _DIGEST.fullmatch(digest):  # it stands in the header of some file
        return None
    try:
        found = json.loads((_FOLDER / f"{digest}.json").read_bytes())
        return Program(str(found["name"]), dict(found["files"]))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def changed(before: Program, now: Program) -> list[str]:
    """Return the files that are not what they were, new ones and missing ones too."""
    names = before.files.keys() | now.files.keys()
    return sorted(name for name in names if before.files.get(name) != now.files.get(name))
