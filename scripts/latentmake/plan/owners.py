"""Owners of cache folders: the project that may remove what it does not know in `cache/{dataset}`.

A folder inside of a project is its own. Where `cache`, or the folder of a dataset, is a link or a
mount, the first project that builds there notes its path in a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from latentmake.errors import ConfigError, StorageError
from latentmake.files import atomic
from latentmake.files.disk import device_of
from latentmake.plan.state import PartState
from latentmake.plan.target import PROMPTS

OWNER = ".latentmake-owner"
ADOPTED = "adopted.tsv"
"""Record of adopted files, in the cache folder of a dataset's model."""
_MADE_BY_BUILDS = (".latentmake", ".snakemake", "runs")


def other_owner(dataset: str) -> Path | None:
    """Return the project that owns the caches of a dataset; None if it is this one, or gone.

    A project that was moved, copied or deleted has no such folder any more, or another one, so that
    its note counts for nothing.
    """
    folder = Path("cache", dataset)
    noted = _noted(folder)
    place = noted or Path(os.path.realpath(folder))
    project = place.parent.parent
    try:
        if not place.samefile(folder) or project.samefile("."):
            return None
    except PermissionError:
        return project  # another user's
    except (OSError, ValueError):
        return None
    return project if noted or any((project / each).exists() for each in _MADE_BY_BUILDS) else None


def claim(datasets: Iterable[str]) -> None:
    """Note this project as the owner of the caches of some datasets that lie outside of it."""
    for dataset in datasets:
        folder = Path("cache", dataset)
        mine = Path.cwd() / folder
        with contextlib.suppress(OSError, StorageError):  # it cannot be written
            outside = os.path.realpath(folder) != str(mine) or device_of(folder) != device_of(".")
            if outside and _noted(folder) != mine and other_owner(dataset) is None:
                atomic.write(folder / OWNER, os.fsencode(mine))


def refuse_other_items(dataset: str, parts: Iterable[PartState]) -> None:
    """Refuse to work on another project's caches, unless both have the same items.

    Prompts are named by their content: those of the other project stay.

    Raises:
        ConfigError: this build would remove or replace some of them, or the other's would do so.
    """
    touched = [part for part in parts if part.orphans or part.stale]
    project = other_owner(dataset) if touched else None
    if project is None:
        return
    count = 0
    for part in touched:
        half = [path for path in part.orphans if path.endswith(atomic.TEMPORARY_SUFFIX)]
        # Those the other project may be writing just now.
        part.orphans = sorted({*part.orphans} - {*half}) if dataset != PROMPTS else []
        count += len(part.orphans) + sum(
            each.reason != "damaged" and (each.target.found is not None or part.fresh > 0)
            for each in part.stale
        )
    if count and dataset != PROMPTS:
        raise ConfigError(
            f"the project {project} uses this folder too, and its items are not those of "
            f"{Path.cwd()}: {count} cache files differ",
            where=f"cache/{dataset}",
            hint="rename the dataset in one of them (equal files are linked), make `cache` a "
            "folder of this project, or build there first if the items are meant to be the same",
        )


def _noted(folder: Path) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(os.fsdecode((folder / OWNER).read_bytes()))
    return None
