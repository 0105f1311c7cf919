"""`latentmake prune`: cache files that the configuration does not need.

A project may have a configuration for each dataset, so the datasets of others are listed with
`--all` only. Only files that Latentmake wrote are listed: cache files by their headers, unfinished
ones by their names. All of them can be made again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from stat import S_ISREG

import typer

from latentmake.errors import ConfigError, StorageError, UserError, refuse_unknown
from latentmake.files import atomic
from latentmake.files.cachefile import header_of
from latentmake.files.workspace import OWNER, human, other_owner
from latentmake.plan.build import alone
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, parts_of
from latentmake.plan.store import KEPT
from latentmake.words.project import opened, printable, table

Files = dict[str, os.stat_result]
Groups = dict[tuple[str, str], Files]
"""Files that may be removed: what and why -> path -> stat."""


def prune(
    datasets: Sequence[str] | None = None,
    everything: bool = False,
    yes: bool = False,
    verbose: bool = False,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """List caches that the configuration does not need any more, or remove them with --yes."""
    with opened(configfile, directory, encoders=True) as project:
        known = prunable(project.facts)
        for name in datasets or ():
            refuse_unknown("dataset", name, known, "prune")
        names = datasets or sorted(project.config.datasets)
        others = [name for name in known if name not in names and other_owner(name) is None]
        with alone() if yes else contextlib.nullcontext():
            found = {name: find(project.facts, name) for name in names}
            further = {name: find(project.facts, name) for name in others if everything}
            if not as_json:
                unnamed = [name for name in others if name != PROMPTS and not datasets]
                _show_all(found, further, unnamed, verbose=verbose)
            found |= further
            files = all_files(group for groups in found.values() for group in groups.values())
            if yes:
                remove(files)
    if as_json:
        typer.echo(json.dumps(_values(found, removed=yes), indent=1))
    elif yes:
        typer.echo(f"removed {_amount(files)}")
    elif files:
        typer.echo("nothing is removed yet; to remove these files, add --yes")


def all_files(groups: Iterable[Files]) -> Files:
    """Return the files of some groups."""
    return {path: stat for files in groups for path, stat in files.items()}


def remove(files: Files) -> None:
    """Remove files, and the folders of `cache/` that are empty then; raises StorageError."""
    for path in files:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            hint, what = "check the permissions of its folder", error.strerror
            raise StorageError(f"cannot be removed ({what})", where=path, hint=hint) from None
    above = {str(each) for path in files for each in [*Path(path).parents][:-2]}
    for folder in sorted(above, key=len, reverse=True):
        if folder.startswith("cache/"):
            with contextlib.suppress(OSError):  # it is not empty, or a link
                Path(folder).rmdir()


# -- shown ----------------------------------------------------------------------------------------


def _values(found: Mapping[str, Groups], *, removed: bool) -> dict[str, object]:
    """Return what `--json` prints."""
    files = [
        {"path": path, "bytes": stat.st_size, "dataset": name, "reason": why}
        for name, groups in found.items()
        for (_, why), group in groups.items()
        for path, stat in group.items()
    ]
    groups = (group for each in found.values() for group in each.values())
    return {"removed": removed, "bytes": freed(all_files(groups)), "files": files}


def _show_all(
    found: Mapping[str, Groups],
    further: Mapping[str, Groups],
    unnamed: Sequence[str],
    *,
    verbose: bool,
) -> None:
    for name, groups in found.items():
        _show(name, groups, verbose=verbose)
    if further:
        typer.echo("\nNot named by this configuration; another one may need them:\n")
        several = (pair for groups in further.values() for pair in groups.items())
        _show("others", dict(several), verbose=verbose)
    elif unnamed:
        typer.echo(f"not named by this configuration: {', '.join(unnamed)}; see --all")


def _show(name: str, groups: Groups, *, verbose: bool) -> None:
    rows = [
        [what, str(len(files)), human(freed(files)), why] for (what, why), files in groups.items()
    ]
    if rows:
        headers = ["to be removed", "files", "bytes", "reason"]
        table(headers, rows, numbers=headers[1:3])
    files = all_files(groups.values())
    for path, stat in files.items() if verbose else ():
        typer.echo(printable(f"{human(stat.st_size):>10} {path}"))
    typer.echo(f"{name}: " + (f"{_amount(files)} to be removed" if rows else "nothing"))


def _amount(files: Files) -> str:
    return f"{len(files)} file{'s' * (len(files) != 1)}, {human(freed(files))}"


def freed(files: Files) -> int:
    """Return the bytes that removing all of some files frees: a file with other names stays."""
    names = Counter(stat.st_ino for stat in files.values())
    each = {stat.st_ino: stat for stat in files.values()}
    return sum(stat.st_size for inode, stat in each.items() if names[inode] == stat.st_nlink)


# -- found ----------------------------------------------------------------------------------------


def prunable(facts: Facts) -> list[str]:
    """Return the datasets of a configuration, and folders of `cache/` that are none of them."""
    found = {each.name for each in Path("cache").glob("[!.]*") if each.is_dir()}
    return sorted(found | {*facts.config.datasets})


def find(facts: Facts, dataset: str) -> Groups:
    """Return the files of a dataset that the configuration does not name; removes nothing.

    Links, and files that Latentmake did not write, are left out.

    Raises:
        ConfigError: another project uses the caches.
    """
    if (project := other_owner(dataset)) is not None:
        what = f"the project {project} uses this folder too"
        raise ConfigError(what, where=f"cache/{dataset}", hint="give the command in its folder")
    config, found, parts = facts.config, Groups(), dict[str, set[str]]()
    needed = (parts_of(config, run, generated=True) for run in config.runs.values())
    for part in chain.from_iterable(needed):
        if part.dataset == dataset:
            folder = facts.layout(part.model).folder(*part)
            parts.setdefault(part.model, set()).add(folder.split("/", 3)[3])

    @cache
    def bases(model: str) -> set[str] | None:
        """Return the names of the items that are there; None where nobody can tell."""
        layout = facts.layout(model)
        with contextlib.suppress(UserError):
            return {layout.base(item.stem) for item in facts.items(dataset, model)[0]}
        return None

    def is_awaited(model: str, place: str = "", *name: str) -> bool:
        """Whether a file that is kept apart may have its item back, so that a build links it."""
        if (
            place not in parts.get(model, ())
            or Path("cache", dataset, model, place, *name).exists()
        ):
            return False
        there = bases(model)
        return there is None or not there.isdisjoint(facts.layout(model).owners("/".join(name)))

    for path, stat in _files_below(Path("cache", dataset)):
        names = Path(path).parts[2:]
        if names[0] == KEPT and not _is_temporary(path) and is_awaited(*names[1:]):
            continue
        if reason := _reason(facts, dataset, parts, names):
            named = names == (OWNER,) or _is_temporary(path)
            if named or (names[1:] and header_of(Path(path))):
                found.setdefault(reason, {})[path] = stat
    return found


def _reason(
    facts: Facts, dataset: str, parts: Mapping[str, set[str]], names: Sequence[str]
) -> tuple[str, str] | None:
    """Return the group and the reason of a file that runs do not need; else None.

    `parts` has the folders of each model that they need, `names` are below `cache/{dataset}`.
    """
    root, model, *others = f"cache/{dataset}", *names, ""
    if model == OWNER:
        return None if parts else (root, "no run has the dataset")
    if _is_temporary(names[-1]):
        return root, "unfinished files of jobs that were killed"
    if model == KEPT:
        return f"{root}/{KEPT}", "their items are gone"
    if model not in parts:
        return f"{root}/{model}", f"no run of {dataset} has the model {model}"
    if others[0] not in parts[model]:
        return f"{root}/{model}/{others[0]}", f"no run needs {others[0]} of it"
    layout = facts.layout(model)
    if layout.owners("/".join(others[1:-1])):
        return None  # builds remove what has no item
    return f"{root}/{model}/{others[0]}", f"not of the layout {layout.name}"


def _files_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and stat of each file below a folder; links are not followed."""
    for path in () if folder.is_symlink() else sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                yield str(path), stat


def _is_temporary(path: str) -> bool:
    return path.endswith(atomic.TEMPORARY_SUFFIX)
