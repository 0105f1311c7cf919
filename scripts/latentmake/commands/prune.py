"""`latentmake prune`: list or remove cache files that the configuration does not need.

A project may have one configuration per dataset. Therefore datasets that this configuration does
not name are listed only with `--all`. Only files that Latentmake wrote are listed: cache files are
recognised by their headers, unfinished files by their names. A build can make all of them again.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from stat import S_ISREG

import typer

from latentmake.base import atomic
from latentmake.base.errors import (
    ConfigError,
    StorageError,
    UserError,
    refuse_folder,
    refuse_unknown,
)
from latentmake.base.machine import counted, human
from latentmake.base.workspace import OWNER, other_owner
from latentmake.commands.project import print_json, printable, table
from latentmake.formats.cachefile import header_of
from latentmake.layouts.layout import CAPTIONS
from latentmake.plan.build_locks import alone
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, parts_of
from latentmake.plan.store import KEPT

Files = dict[str, os.stat_result]
Groups = dict[tuple[str, str], Files]
"""Files that may be removed: group and reason -> path -> stat."""


def prune(
    facts: Facts,
    datasets: Sequence[str] | None,
    everything: bool,
    yes: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """List caches that the configuration does not need any more, or remove them with --yes."""
    prunables = prunable(facts)
    for name in datasets or ():
        refuse_unknown("dataset", name, prunables, "prune")
    names = datasets or sorted(facts.config.datasets)
    others = [name for name in prunables if name not in names and other_owner(name) is None]
    # A build must not start while its files are listed and removed.
    with alone() if yes else contextlib.nullcontext():
        removable = {name: find(facts, name) for name in names}
        further = {name: find(facts, name) for name in others if everything}
        if not as_json:
            unnamed = [name for name in others if name != PROMPTS and not datasets]
            for name, groups in removable.items():
                _show(name, groups, verbose=verbose)
            if further:
                typer.echo("\nNot named by this configuration; another one may need them:\n")
                several = (pair for groups in further.values() for pair in groups.items())
                _show("others", dict(several), verbose=verbose)
            elif unnamed:
                typer.echo(f"not named by this configuration: {', '.join(unnamed)}; see --all")
        removable |= further
        files = all_files(group for groups in removable.values() for group in groups.values())
        if yes:
            remove(files)
    if as_json:
        print_json(_values(removable, files, removed=yes))
    elif yes:
        typer.echo(f"removed {_amount(files)}")
    elif files:
        typer.echo("nothing is removed yet; to remove these files, add --yes")


def all_files(groups: Iterable[Files]) -> Files:
    """Return the files of all these groups."""
    return {path: stat for files in groups for path, stat in files.items()}


def remove(files: Files) -> None:
    """Remove files, and then the empty folders below `cache/`; raises StorageError."""
    for path in files:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            hint, what = "check the permissions of its folder", error.strerror
            raise StorageError(f"cannot be removed ({what})", where=path, hint=hint) from None
    above = {str(folder) for path in files for folder in [*Path(path).parents][:-2]}
    for folder in sorted(above, key=len, reverse=True):  # inner folders before outer ones
        if folder.startswith("cache/"):
            with contextlib.suppress(OSError):  # it is not empty, or it is a link
                Path(folder).rmdir()


# -- shown ----------------------------------------------------------------------------------------


def _values(removable: Mapping[str, Groups], files: Files, *, removed: bool) -> dict[str, object]:
    """Return the values that `--json` prints."""
    values = [
        {"path": path, "bytes": stat.st_size, "dataset": name, "reason": why}
        for name, groups in removable.items()
        for (_, why), group in groups.items()
        for path, stat in group.items()
    ]
    return {"removed": removed, "bytes": freed(files), "files": values}


def _show(name: str, groups: Groups, *, verbose: bool) -> None:
    pairs = groups.items()
    rows = [[what, str(len(files)), human(freed(files)), why] for (what, why), files in pairs]
    if rows:
        headers = ["to be removed", "files", "bytes", "reason"]
        table(headers, rows, numbers=headers[1:3])
    files = all_files(groups.values())
    for path, stat in files.items() if verbose else ():
        typer.echo(printable(f"{human(stat.st_size):>10} {path}"))
    typer.echo(f"{name}: " + (f"{_amount(files)} to be removed" if rows else "nothing"))


def _amount(files: Files) -> str:
    return f"{counted(len(files), 'file')}, {human(freed(files))}"


def freed(files: Files) -> int:
    """Return the number of bytes that the removal of these files frees.

    A file that keeps another hard link frees nothing.
    """
    names = Counter(stat.st_ino for stat in files.values())
    stats = {stat.st_ino: stat for stat in files.values()}
    return sum(stat.st_size for inode, stat in stats.items() if names[inode] == stat.st_nlink)


# -- found ----------------------------------------------------------------------------------------


def prunable(facts: Facts) -> list[str]:
    """Return the names of all datasets of the configuration and of all folders of `cache/`."""
    folders = next(os.walk("cache", onerror=refuse_folder), ("", [], []))[1]
    return sorted({name for name in folders if name[0] != "."} | {*facts.config.datasets})


def find(facts: Facts, dataset: str) -> Groups:
    """Find the files of a dataset that the configuration does not need, without removing them.

    Links and files that Latentmake did not write are left out.

    Raises:
        ConfigError: Another project uses the caches.
        StorageError: A folder cannot be read.
    """
    if (project := other_owner(dataset)) is not None:
        what = f"the project {project} uses this folder too"
        raise ConfigError(what, where=f"cache/{dataset}", hint="give the command in its folder")
    config, removable, parts = facts.config, Groups(), dict[str, set[str]]()
    needed = (parts_of(config, run, generated=True) for run in config.runs.values())
    for part in chain.from_iterable(needed):
        if part.dataset == dataset:
            folder = facts.layout(part.model).folder(*part)
            parts.setdefault(part.model, set()).add(folder.split("/", 3)[3])

    @cache
    def bases(model: str) -> set[str] | None:
        """Return the base names of the existing items; None if they cannot be listed."""
        layout = facts.layout(model)
        with contextlib.suppress(UserError):
            return {layout.base(item.stem) for item in facts.items(dataset, model)[0]}
        return None

    def is_awaited(model: str, place: str = "", *name: str) -> bool:
        """Return whether the item of a kept file may have returned.

        If so, the next build links the file to its old name again.
        """
        if (
            place not in parts.get(model, ())
            or Path("cache", dataset, model, place, *name).exists()
        ):
            return False
        existing = bases(model)
        owners = facts.layout(model).owners("/".join(name))
        return existing is None or not existing.isdisjoint(owners)

    for path, stat in _files_below(Path("cache", dataset)):
        names = Path(path).parts[2:]
        if names[0] == KEPT and not _is_temporary(path) and is_awaited(*names[1:]):
            continue
        if reason := _reason(facts, dataset, parts, names):
            named = names == (OWNER,) or _is_temporary(path)
            if named or (names[1:] and header_of(Path(path))):
                removable.setdefault(reason, {})[path] = stat
    return removable


def _reason(
    facts: Facts, dataset: str, parts: Mapping[str, set[str]], names: Sequence[str]
) -> tuple[str, str] | None:
    """Return the group and the reason of a file that no run needs; None if a run needs it.

    Args:
        facts: facts about the configuration.
        dataset: name of the dataset.
        parts: model -> folders that runs need.
        names: names of the path's folders and of the file, below `cache/{dataset}`.
    """
    root, model, *others = f"cache/{dataset}", *names, ""
    if model == OWNER:
        return None if parts else (root, "no run has the dataset")
    if _is_temporary(names[-1]):
        return root, "unfinished files of jobs that were killed"
    if model == KEPT:
        return f"{root}/{KEPT}", "their items are gone"
    if model not in parts:
        what = "captioners" if model == CAPTIONS else f"the model {model}"
        return f"{root}/{model}", f"no run of {dataset} has {what}"
    if others[0] not in parts[model]:
        return f"{root}/{model}/{others[0]}", f"no run needs {others[0]} of it"
    layout = facts.layout(model)
    if layout.owners("/".join(others[1:-1])):
        return None  # a build moves the files of missing items away
    return f"{root}/{model}/{others[0]}", f"not of the layout {layout.name}"


def _files_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and stat of each regular file below a folder; links are left out."""
    below = () if folder.is_symlink() else os.walk(folder, onerror=refuse_folder)
    for path in sorted(Path(place, name) for place, _, names in below for name in names):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                yield str(path), stat


def _is_temporary(path: str) -> bool:
    return path.endswith(atomic.TEMPORARY_SUFFIX)
