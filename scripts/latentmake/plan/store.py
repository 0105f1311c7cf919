"""The store: replaced and removed cache files, named by key, up to a limit in bytes.

If an edit or a setting is undone, or an item returns, a build links the files from here instead of
encoding them again. Users may delete files of this folder, or the folder, at any time.

Caches of items that vanish in bulk are kept apart. A drive that is not mounted, an incomplete
listing and a list that lost rows look as if somebody deleted items. So the caches of a few items go
to the store, and the caches of many wait in `cache/{dataset}/.kept`. No limit empties that folder,
and no trainer reads it. When the items return, the next build links their caches from there. If
they never return, `latentmake prune` removes the caches.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from latentmake.base import atomic
from latentmake.base.errors import CacheError, ConfigError
from latentmake.base.workspace import other_owner
from latentmake.data.item import Scan
from latentmake.data.memo import Folder, Memo
from latentmake.formats import cachefile
from latentmake.plan.facts import UNKNOWN
from latentmake.plan.judge import FORCED, PartState, State, key_of
from latentmake.plan.orders import PROMPTS, Order, Target

STORE = Path(".latentmake/store")
_MOST_AT_HAND = 3  # most files that a job tries to link for one target
KEPT = ".kept"
"""Folder of the files that are kept apart, below the dataset's folder of caches."""
_FEW = 10  # so many cache files a build may always remove
_SHARE = 10  # a build may also remove one tenth of a dataset's cache files


def stored(key: str) -> Path:
    """Return the path of a key's file in the store."""
    return STORE / key


def keys() -> set[str]:
    """Return the keys of all files in the store."""
    with contextlib.suppress(OSError):
        return set(os.listdir(STORE))  # noqa: PTH208 -- avoids thousands of Path objects
    return set()


def holds(path: Path, key: str) -> bool:
    """Return whether a cache file exists, is complete and has a certain key."""
    header = cachefile.header_of(path)  # None if it is missing, or cut short by a power failure
    return header is not None and header.key == key


def present_key(target: Target) -> str:
    """Return the key of a target's file, or "" if it is missing or damaged.

    The header is read only if the file changed since the plan.
    """
    path = Path(target.path)
    with contextlib.suppress(OSError):
        if path.stat().st_mtime_ns == target.found_mtime:
            return target.found_key
    header = cachefile.header_of(path)
    return header.key if header else ""


def link(existing: Path, path: Path, key: str) -> bool:
    """Hard-link the file of a key to a further name; return False if it is gone or replaced."""
    # A file of the store is never replaced; another job may have replaced a cache file.
    if existing.parts[0] == path.parts[0] and not holds(existing, key):
        return False
    with contextlib.suppress(FileNotFoundError):
        atomic.link(existing, path)
        return True
    return False


def put(path: Path, key: str) -> None:
    """Move a cache file into the store, or delete it if the store cannot take it."""
    with contextlib.suppress(OSError):
        STORE.mkdir(parents=True, exist_ok=True)
        path.replace(stored(key))
    path.unlink(missing_ok=True)  # `replace` does nothing if both names are hard links of one file


def keep(orders: Iterable[Order]) -> None:
    """Link the present files of some orders' targets into the store.

    Jobs replace these files, and Snakemake deletes those that a job declares. If an edit or a
    change of the configuration is undone, the next job links them from the store.
    """
    for target in (target for order in orders for target in order.targets):
        with contextlib.suppress(OSError):  # the store only saves work
            key = present_key(target)
            if key and not holds(stored(key), key):
                STORE.mkdir(parents=True, exist_ok=True)
                stored(key).unlink(missing_ok=True)  # a damaged file; os.link replaces none
                os.link(target.path, stored(key))


def forget_made(orders: Iterable[Order]) -> None:
    """Delete store files that are hard-linked to a target of these orders.

    Such a file would keep disk space in use after the user deletes the target. Files that are
    linked to other names stay: in a project that was copied by hard links, every file is.
    """
    shared = {(stat.st_dev, stat.st_ino): path for path, stat, _ in _files() if stat.st_nlink > 1}
    for target in (path for order in orders for path in order.paths) if shared else ():
        with contextlib.suppress(OSError):
            stat = os.lstat(target)
            if path := shared.pop((stat.st_dev, stat.st_ino), None):
                Path(path).unlink()


def used() -> int:
    """Return the bytes that deleting the store would free."""
    return sum(size for _, _, size in _files())


def limit(size: int) -> None:
    """Delete the oldest files until the store takes at most `size` bytes; 0 empties it.

    The age of a file is its change time, which a new hard link sets, not the time of its content.
    """
    files = sorted(_files(), key=lambda file: file[1].st_ctime_ns)
    excess = sum(freed for _, _, freed in files) - size
    for path, _, freed in files:
        if size and excess <= 0:
            break
        with contextlib.suppress(OSError):  # somebody made a folder there
            if freed or not size:
                Path(path).unlink()
                excess -= freed


def _files() -> Iterator[tuple[str, os.stat_result, int]]:
    """Yield path and stat of each file, and the bytes that its deletion frees.

    They are 0 if the file has another hard link or is a partial file.
    """
    with contextlib.suppress(OSError), os.scandir(STORE) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                counts = stat.st_nlink == 1 and not entry.name.endswith(atomic.TEMPORARY_SUFFIX)
                yield entry.path, stat, stat.st_size if counts else 0


# -- cache files whose items vanish in bulk -------------------------------------------------------


def is_bulk(number: int, total: int) -> bool:
    """Return whether `number` of `total` cache files are too many for a build to remove."""
    return number > _FEW and number * _SHARE > total


def vanished(
    memo: Memo,
    dataset: str,
    states: Mapping[tuple[str, str], State],
    scan: Scan,
    apart: Mapping[str, str],
) -> set[str]:
    """Return the cache files of a dataset that a build must keep apart, or must leave apart.

    Files whose content another target has or needs do not count, because their items were renamed,
    moved or are back. Files that are apart already count. Otherwise a series of builds could remove
    the files that one build may not remove.

    Args:
        memo: memo with the keys of all cache files.
        dataset: name of the dataset.
        states: states of all datasets and models of the plan.
        scan: listing of the dataset.
        apart: path -> key of the dataset's files that are apart already.
    """
    places = [place for place in states if place[0] == dataset]
    dataset_parts = [part for place in places for part in states[place].parts.values()]
    gone = {path for part in dataset_parts for path in part.gone}
    if not gone and not apart:
        return set()
    parts = [part for state in states.values() for part in state.parts.values()]
    linked = {path for part in parts for target in part.to_make for path in target.at_hand}
    keys = {path: key for path, (_, key) in memo.targets.look_up(gone | linked).items()}
    # The names of files in the store are keys.
    needed = {keys.get(path) or Path(path).name for path in linked}
    waiting = {path for path, key in apart.items() if key not in needed}
    has_broken_links = scan.items is None and any(size < 0 for _, size, *_ in scan.entries)
    if not has_broken_links and not is_bulk(len(gone) + len(waiting), 0):
        return waiting
    needed.update(key for part in parts for key in part.keys_by_name().values())
    lost = {path for path in gone if keys.get(path) not in needed}
    there = sum(len(Folder("/".join(("cache", *place))).listing()) for place in places)
    if has_broken_links or is_bulk(len(lost) + len(waiting), there + len(waiting)):
        return lost | waiting
    return waiting


def warning(dataset: str, number: int, options: Sequence[str]) -> str:
    """Return a line on the files of a dataset that are kept apart, or will be.

    `options` are the command-line options that name the configuration.
    """
    files = "cache file has" if number == 1 else "cache files have"
    command = shlex.join(["latentmake", "prune", dataset, *options])
    return (
        f"{dataset}: {number} {files} no item any more; they are kept in cache/{dataset}/{KEPT} "
        f"until their items return, and `{command}` removes them"
    )


def keep_apart(path: Path) -> None:
    """Move a cache file out of the folders that builds and trainers read."""
    cache, dataset, *names = path.parts
    atomic.link(path, Path(cache, dataset, KEPT, *names))
    path.unlink()


def kept_apart(memo: Memo, dataset: str) -> dict[str, str]:
    """Return the path and key of each file that is kept apart; the memo learns new ones."""
    folder = f"cache/{dataset}/{KEPT}"
    if not os.path.isdir(folder):  # noqa: PTH112 -- runs in every plan
        return {}
    return _keys_below(memo, folder)


def _keys_below(memo: Memo, folder: str) -> dict[str, str]:
    """Return the path and key of each complete cache file in a folder; the memo learns new ones."""
    cached, keys_by_path = memo.targets.below(folder), dict[str, str]()
    for path, stat in Folder(folder).listing().items():
        with contextlib.suppress(CacheError, OSError):  # half written: `prune` removes it
            keys_by_path[path], _ = key_of(memo, cached, path, stat)
    return keys_by_path


def returned(datasets: Iterable[str]) -> Iterator[str]:
    """Yield the files that are kept apart although a build has made their caches again."""
    for dataset in datasets:
        folder = Path("cache", dataset, KEPT)
        for path in folder.rglob("*"):
            if path.is_file() and (folder.parent / path.relative_to(folder)).exists():
                yield str(path)


def refuse_other_items(dataset: str, parts: Iterable[PartState]) -> None:
    """Refuse to work on another project's caches, unless both projects have the same items.

    Prompts never conflict: they are named by their content, and the other project's prompts stay.

    Raises:
        ConfigError: this build or the other project's would remove or replace some of the caches.
    """
    touched = [part for part in parts if part.orphans or part.stale]
    project = other_owner(dataset) if touched else None
    if project is None:
        return
    count = 0
    for part in touched:
        # Partial files stay: the other project may be writing them just now.
        complete = {path for path in part.orphans if not path.endswith(atomic.TEMPORARY_SUFFIX)}
        part.orphans = sorted(complete) if dataset != PROMPTS else []
        replaced = [target for target in part.to_make if target.found is not None or part.fresh > 0]
        others = [target for target in replaced if target.reason not in ("damaged", FORCED)]
        count += len(part.orphans) + len(others)
    if count and dataset != PROMPTS:
        raise ConfigError(
            f"the project {project} uses this folder too, and its items are not those of "
            f"{Path.cwd()}: {count} cache files differ",
            where=f"cache/{dataset}",
            hint="rename the dataset in one of them (equal files are linked), make `cache` a "
            "folder of this project, or build there first if the items are meant to be the same",
        )


# -- reusable files -------------------------------------------------------------------------------


def mark_reusable(memo: Memo, states: Iterable[State]) -> None:
    """Note in each stale target the existing files with the key that it needs.

    Such files exist if an item, dataset or model was renamed, an edit was undone or a setting was
    set back. Their keys come from the memo: no file is opened here, and the job checks them. Forced
    targets get none, because they are encoded.
    """
    for folder in map(str, Path("cache").glob("*/*/")):
        if not memo.targets.any(folder):  # the memo was deleted
            with contextlib.suppress(CacheError):
                _keys_below(memo, folder)
    kept = keys()
    if not kept and not memo.targets.any():
        return
    wanted, marked = dict[str, list[str]](), list[PartState]()  # path of a target -> possible keys
    for judge, parts in ((state.judge, state.parts) for state in states if state.judge):
        names = {name for name, recipe in judge.recipes.items() if recipe != UNKNOWN}
        stale = [parts[name] for name in parts if name in names.difference(judge.forced)]
        works = [work for part in stale for work in part.stale]
        if works:
            judge.contents.prepare_presumed([work.item for work in works])
        marked += stale
        for item, targets, _ in works:
            contents = judge.contents.presumed(item)
            for target in targets:
                if not judge.forces(target):
                    needed = (judge.needed(item, target, content) for content in contents)
                    wanted[target.path] = [*filter(None, needed)]
    files = _files_by_key({*chain(*wanted.values())}, memo, kept)
    for part in marked:
        part.stale[:] = [
            work._replace(targets=tuple(_linked(target, wanted, files) for target in work.targets))
            for work in part.stale
        ]


def _linked(target: Target, keys: dict[str, list[str]], files: dict[str, list[str]]) -> Target:
    """Return a target with the files that have one of its keys, if there are any."""
    paths = (path for key in keys.get(target.path, ()) for path in files.get(key, ()))
    at_hand = tuple(islice(paths, _MOST_AT_HAND))
    return target._replace(reason="reusable", at_hand=at_hand) if at_hand else target


def _files_by_key(wanted: set[str], memo: Memo, kept: set[str]) -> dict[str, list[str]]:
    """Return key -> the files with that key, those of the store first."""
    files = {key: [str(stored(key))] for key in wanted & kept}
    gone = []
    for path, stat, key in sorted(memo.targets.where("value", wanted)):
        try:
            if os.lstat(path).st_size == stat.size:
                files.setdefault(key, []).append(path)
        except OSError:
            gone.append(path)
    memo.targets.forget(gone)
    return files
