"""Job of `prune_{dataset}`: list files without a name in the configuration; remove listed files.

Only files that this tool wrote are listed: cache files by their headers, unfinished ones by their
names, a manifest by the digest in its lock. Removed is what was shown before, is to be removed
still, and has not changed since.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from latentmake import digest, layouts
from latentmake.errors import CacheError, StorageError
from latentmake.files import atomic
from latentmake.files.cachefile import read_header
from latentmake.files.disk import human
from latentmake.files.removal import ListedFile, files_below, freed, remove, remove_empty
from latentmake.plan.manifest import read_lock
from latentmake.plan.owners import OWNER
from latentmake.plan.prune_order import PruneOrder
from latentmake.plan.store import STORE

__all__ = ["Prunable", "find", "prune"]

_SHOWN = 10
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{16,32}}(\.\d+)+{re.escape(atomic.TEMPORARY_SUFFIX)}")
_FOREIGN = "not written by latentmake"
_NAMED = "the configuration names it"


@dataclass
class Prunable:
    """What may be removed.

    Attributes:
        groups: what and why -> files.
        left: path -> why it stays.
    """

    groups: dict[tuple[str, str], list[ListedFile]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, why: str, file: ListedFile) -> None:
        """Add a file to a group."""
        self.groups.setdefault((what, why), []).append(file)

    @property
    def files(self) -> list[ListedFile]:
        """All files to be removed."""
        return [file for files in self.groups.values() for file in files]


def find(order: PruneOrder) -> Prunable:
    """Return files without a name in the configuration; removes nothing."""
    found = Prunable()
    _find_caches(order, found)
    if order.recipes is not None:
        _find_stored({*order.recipes}, found)
    _find_manifests(order, found)
    return found


def _find_caches(order: PruneOrder, found: Prunable) -> None:
    """Find caches of unnamed models and parts, and of other layouts than a model's."""
    root = f"cache/{order.dataset}"
    for path, file in files_below(root):
        model, _, rest = path.removeprefix(f"{root}/").partition("/")
        part, _, name = rest.partition("/")
        if model == OWNER and not rest:
            if file is not None and not order.folders:
                found.add(root, "no run has the dataset", file)
            continue
        what, why = f"{root}/{model}", f"no run of {order.dataset} has the model {model}"
        if model in order.folders:
            what, why = f"{root}/{model}/{part}", f"no run needs {part} of it"
            if part in order.folders[model]:
                if layouts.of(order.layouts[model]).owners(name) or _is_temporary(path):
                    continue  # builds remove what has no item
                why = f"not of the layout {order.layouts[model]}"
        if file is None:
            found.left[path] = "a link, or no regular file"
        elif not rest or not (_is_temporary(path) or _key(path)):
            found.left[path] = _FOREIGN
        elif _is_spared(path, order.spared):
            found.left[path] = _NAMED
        else:
            found.add(what, why, file)


def _is_temporary(path: str) -> bool:
    return _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None


def _key(path: str) -> str | None:
    try:
        return read_header(path).key
    except (CacheError, OSError):
        return None


def _is_spared(path: str, spared: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == each or real.startswith(f"{each}/") for each in spared)


def _find_stored(recipes: set[str], found: Prunable) -> None:
    """Find files of the store whose recipe no run has, so that no build links them."""
    for path, file in files_below(str(STORE)):
        try:
            header = read_header(path) if file is not None else None
        except (CacheError, OSError):
            header = None
        if header is None or file is None or header.key != path.removeprefix(f"{STORE}/"):
            if not _is_temporary(path):
                found.left[path] = _FOREIGN
        elif header.recipe not in recipes:
            found.add(str(STORE), "no run has their recipe", file)


def _find_manifests(order: PruneOrder, found: Prunable) -> None:
    """Find manifests and locks of the dataset's runs that are gone; weights and pictures stay."""
    for folder in _folders("runs"):
        if folder.name in order.runs:
            continue
        paths = [folder / "dataset.lock", folder / "manifest.jsonl"]
        lock = read_lock(paths[0])
        if not any(part.startswith(f"{order.dataset}/") for part in lock.parts):
            continue
        try:
            ours = digest.of_file(paths[1]) == lock.manifest
            files = [ListedFile.of(str(path), path.lstat()) for path in paths]
        except OSError:
            continue
        for file, path in zip(files, paths, strict=True):
            if ours and file.is_same(path.lstat()):
                found.add(str(folder), f"there is no run {folder.name}", file)


def _folders(parent: str) -> Iterator[Path]:
    if Path(parent).is_dir():
        for each in sorted(Path(parent).iterdir()):
            if each.is_dir() and not each.is_symlink():
                yield each


def prune(order: PruneOrder, say: Callable[[str], None]) -> str:
    """List what may be removed, or remove what was listed before; return what to print.

    Args:
        order: of the pruning.
        say: prints a line into the log as well.

    Raises:
        StorageError: nothing was listed before, or a file cannot be removed.
    """
    found = find(order)
    if not order.confirm:
        _write_list(order.list_path, found)
        return _listing(order, found)
    listed = _read_list(order)
    left: Counter[str] = Counter()
    removed: list[ListedFile] = []
    now = {file.path: file for file in found.files}
    chosen = [file for path, file in now.items() if listed.get(path) == file]
    left["changed since they were listed"] = len(listed.keys() & now.keys()) - len(chosen)
    left["gone or named again"] = len(listed.keys() - now.keys())
    left["not listed before"] = len(now.keys() - listed.keys())
    failed: list[tuple[str, str | None]] = []
    for file in chosen:
        try:
            if remove(file):
                removed.append(file)
            else:
                left["changed since they were listed"] += 1
        except OSError as error:
            failed.append((file.path, error.strerror))
    left["could not be removed"] = len(failed)
    remove_empty(file.path for file in removed if file.path.startswith("cache/"))
    line = f"pruned {order.dataset}: removed {_count(len(removed))}, {human(freed(removed))}"
    say("; ".join([line, *(f"{n} left: {why}" for why, n in left.items() if n)]))
    if failed:
        path, fault = failed[0]
        what = f"cannot be removed ({fault})"
        raise StorageError(what, where=path, hint="check the permissions of its folder")
    order.list_path.unlink(missing_ok=True)
    return ""


def _write_list(path: Path, found: Prunable) -> None:
    groups = [
        {"what": what, "why": why, "files": files} for (what, why), files in found.groups.items()
    ]
    values = {"groups": groups, "left": found.left, "bytes": freed(found.files)}
    atomic.write(path, json.dumps(values, indent=1).encode())


def _read_list(order: PruneOrder) -> dict[str, ListedFile]:
    try:
        groups = json.loads(order.list_path.read_bytes())["groups"]
        files = [ListedFile(*file) for group in groups for file in group["files"]]
    except (OSError, ValueError, TypeError, LookupError):
        raise StorageError(
            "nothing was listed for removal",
            where=f"prune_{order.dataset}",
            hint=f"look at the list first: snakemake prune_{order.dataset}",
        ) from None
    return {file.path: file for file in files}


def _listing(order: PruneOrder, found: Prunable) -> str:
    """Return the list for people."""
    groups = found.groups.items()
    rows = [[what, len(files), human(freed(files)), why] for (what, why), files in groups]
    if order.memo_rows:
        rows.append(["memo", f"{order.memo_rows} rows", "", "of files that nobody names"])
    headers = ["to be removed", "files", "bytes", "reason"]
    align = ("left", "right", "right", "left")
    lines = [tabulate(rows, headers=headers, disable_numparse=True, colalign=align)] if rows else []
    if order.verbose:
        lines += [f"{human(file.size):>10} {file.path}" for file in found.files]
    if order.recipes is None:
        lines.append(f"left: {STORE}: a run's recipe is not known ({order.unknown})")
    shown = found.left.items() if order.verbose else [*found.left.items()][:_SHOWN]
    lines += [f"left: {path}: {why}" for path, why in shown]
    if more := len(found.left) - len(shown):
        lines.append(f"left: {more} more (--config verbose=true)")
    total = f"{_count(len(found.files))}, {human(freed(found.files))}"
    if not rows:
        lines.append(f"prune_{order.dataset}: nothing to remove")
    else:
        again = f"snakemake prune_{order.dataset} --config confirm=true"
        lines.append(f"{total} to be removed, listed in {order.list_path}; nothing is removed yet")
        lines.append(f"to remove them: {again}")
    return "".join(f"{_printable(line)}\n" for line in lines)


def _printable(line: str) -> str:
    return line.encode("utf-8", "backslashreplace").decode()


def _count(number: int) -> str:
    return f"{number} file{'s' * (number != 1)}"
