"""The store: cache files by key that builds replaced or removed, up to a limit in bytes.

If an edit or a setting is undone, or an item returns, a build links the files from here instead of
encoding them again. Anything in the folder, and all of it, can be deleted at any time.

Caches of items that vanish in bulk are kept apart. A drive that is not mounted, a listing that
comes back short and a list that lost rows look like items that somebody deleted. So the caches of a
few items go to the store, and those of many wait in `cache/{dataset}/.kept`. No limit empties that
folder and no trainer reads it. When the items return, the next build links their caches from
there; else `latentmake prune` removes them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.data.item import Scan
from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile
from latentmake.index.memo import Folder, Memo
from latentmake.plan.orders import Order
from latentmake.plan.state import PartState, State

STORE = Path(".latentmake/store")
_MOST_AT_HAND = 3  # files that are tried for one target
KEPT = ".kept"
"""Name of the folder of the files that are kept apart, in that of their dataset."""
_FEW = 10  # cache files that a build removes, however few there are
_SHARE = 10  # it removes one of so many


def stored(key: str) -> Path:
    """Return the path of a key's file."""
    return STORE / key


def keys() -> set[str]:
    """Return the keys of all files."""
    with contextlib.suppress(OSError):
        return set(os.listdir(STORE))  # noqa: PTH208 -- no paths are made of many thousand names
    return set()


def holds(path: Path, key: str) -> bool:
    """Whether a cache file exists, is complete and has a key."""
    try:
        return cachefile.read_header(path).key == key
    except (CacheError, OSError):
        return False  # missing, or cut short by a power failure


def link(existing: Path, path: Path, key: str) -> bool:
    """Link the file of a key to a further name; return False if it is gone or replaced."""
    # A file of the store is never replaced; another job may have replaced a cache file.
    if existing.parts[0] == path.parts[0] and not holds(existing, key):
        return False
    try:
        atomic.link(existing, path)
    except FileNotFoundError:
        return False
    return True


def put(path: Path, key: str) -> None:
    """Move a cache file into the store, or delete it where the store cannot take it."""
    with contextlib.suppress(OSError):
        STORE.mkdir(parents=True, exist_ok=True)
        path.replace(stored(key))
    path.unlink(missing_ok=True)  # renaming does nothing between two names of one file


def keep(orders: Iterable[Order]) -> None:
    """Give the files under the names of some orders' targets a further name in the store.

    Jobs replace them, and Snakemake deletes those that a job declares. If an edit or a change of
    the configuration is undone, the next job links them from here.
    """
    for target in (each for order in orders for item in order.items for each in item.targets):
        with contextlib.suppress(OSError, CacheError):  # it spares work, no more
            found, _, moment = (target.found or "").partition("@")
            same = str(Path(target.path).stat().st_mtime_ns) == moment
            key = found if same else cachefile.read_header(target.path).key
            if key != "damaged" and not holds(stored(key), key):
                STORE.mkdir(parents=True, exist_ok=True)
                stored(key).unlink(missing_ok=True)
                os.link(target.path, stored(key))


def forget_made(orders: Iterable[Order]) -> None:
    """Delete the files that bear the name of one of some orders' targets now.

    They would keep the bytes of targets that the user deletes. Files with other names stay: of a
    project that was copied by hard links, all have one.
    """
    shared = {(stat.st_dev, stat.st_ino): path for path, stat, _ in _files() if stat.st_nlink > 1}
    for target in (path for order in orders for path in order.paths) if shared else ():
        with contextlib.suppress(OSError):
            stat = os.lstat(target)
            if path := shared.pop((stat.st_dev, stat.st_ino), None):
                Path(path).unlink()


def used() -> int:
    """Return the size of the store in bytes."""
    return sum(size for _, _, size in _files())


def limit(size: int) -> None:
    """Delete the oldest files until the store takes `size` bytes at most; 0 empties it.

    Age is the change time, which giving a file another name sets, not the time of its content.
    """
    files = sorted(_files(), key=lambda file: file[1].st_ctime_ns)
    excess = sum(freed for _, _, freed in files) - size
    for path, _, freed in files:
        if size and excess <= 0:
            break
        with contextlib.suppress(OSError):  # a folder that somebody put there
            if freed or not size:
                Path(path).unlink()
                excess -= freed


def _files() -> Iterator[tuple[str, os.stat_result, int]]:
    """Yield path and stat of each file, and the bytes that deleting it frees.

    They are 0 if it has another name, or is half written.
    """
    with contextlib.suppress(OSError), os.scandir(STORE) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                alone = stat.st_nlink == 1 and not entry.name.endswith(atomic.TEMPORARY_SUFFIX)
                yield entry.path, stat, stat.st_size if alone else 0


# -- cache files whose items vanish in bulk -------------------------------------------------------


def is_bulk(number: int, total: int) -> bool:
    """Whether so many of a dataset's cache files are too many to be removed by a build."""
    return number > _FEW and number * _SHARE > total


def vanished(
    memo: Memo,
    dataset: str,
    states: Mapping[tuple[str, str], State],
    scan: Scan,
    apart: Mapping[str, str],
) -> set[str]:
    """Return the cache files of a dataset that a build has to keep apart, or goes on to.

    Files whose content another target has or needs do not count: their items were renamed, moved
    or are back. Those that are apart already count, so that no series of builds removes what one
    build may not.

    Args:
        memo: knows the keys of all cache files.
        dataset: its name.
        states: of all datasets and models of the plan.
        scan: the listing of the dataset.
        apart: the files of the dataset that are kept apart, each with its key.
    """
    places = [place for place in states if place[0] == dataset]
    gone = {path for x in places for part in states[x].parts.values() for path in part.gone}
    if not gone and not apart:
        return set()
    parts = [part for state in states.values() for part in state.parts.values()]
    linked = {path for part in parts for stale in part.stale for path in stale.target.at_hand}
    keys = {path: key for path, (_, key) in memo.targets.known(gone | linked).items()}
    needed = {keys.get(path) or Path(path).name for path in linked}  # names in the store are keys
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

    `options` are those of a command that name the configuration.
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
    if not os.path.isdir(folder):  # noqa: PTH112 -- in each plan
        return {}
    known, found = memo.targets.below(folder), dict[str, str]()
    for path, stat in Folder(folder).listing().items():
        fact = known.get(path)
        if fact is None or fact[0] != stat:
            try:
                fact = stat, cachefile.read_header(path).key
            except (CacheError, OSError):
                continue  # half written: `prune` removes it
            memo.targets.learn(path, *fact)
        found[path] = fact[1]
    return found


def returned(datasets: Iterable[str]) -> Iterator[str]:
    """Yield the files that are kept apart though a build has made their caches again."""
    for dataset in datasets:
        folder = Path("cache", dataset, KEPT)
        for path in folder.rglob("*"):
            if path.is_file() and (folder.parent / path.relative_to(folder)).exists():
                yield str(path)


# -- files at hand --------------------------------------------------------------------------------


def mark_reusable(memo: Memo, states: Iterable[State]) -> None:
    """Note for each stale target the files with the key that it needs.

    An item, a dataset or a model was renamed, an edit undone, a setting taken back. The memo tells
    of such files, none is opened, and the job checks them. Forced targets are encoded.
    """
    asked = [
        (state.judge, each)
        for state in states
        if state.judge is not None
        for part, each in state.parts.items()
        if each.stale and state.judge.recipes.get(part) and part not in state.judge.forced
    ]
    if not asked:
        return

    _learn_unknown(memo)
    kept = keys()
    if not kept and not memo.targets.any():
        return
    for judge in {id(each): each for each, _ in asked}.values():
        judge.contents.prepare_presumed(
            stale.item for other, state in asked if other is judge for stale in state.stale
        )
    wanted: list[tuple[PartState, int, list[str]]] = []
    for judge, state in asked:
        for number, (item, target, *_) in enumerate(state.stale):
            if judge.forces(target):
                continue
            found_keys = (judge.needed(item, target, x) for x in judge.contents.presumed(item))
            wanted.append((state, number, [*filter(None, found_keys)]))
    found = _at_hand({key for _, _, needed in wanted for key in needed}, memo, kept)
    for state, number, needed in wanted:
        if paths := [path for key in needed for path in found.get(key, ())]:
            stale = state.stale[number]
            target = stale.target._replace(at_hand=tuple(paths[:_MOST_AT_HAND]))
            state.stale[number] = stale._replace(reason="reusable", target=target)


def _at_hand(wanted: set[str], memo: Memo, kept: set[str]) -> dict[str, list[str]]:
    """Return key -> the files with that key."""
    found = {key: [str(stored(key))] for key in wanted & kept}
    gone = []
    for path, stat, key in sorted(memo.targets.where("value", wanted)):
        try:
            if os.lstat(path).st_size == stat.size:
                found.setdefault(key, []).append(path)
        except OSError:
            gone.append(path)
    memo.targets.forget(gone)
    return found


def _learn_unknown(memo: Memo) -> None:
    """Read the headers of those cache folders of which the memo knows nothing: it was deleted."""
    for folder in map(str, Path("cache").glob("*/*/")):
        if memo.targets.any(folder):
            continue
        with contextlib.suppress(CacheError):
            for file, stat in Folder(folder).listing().items():
                with contextlib.suppress(CacheError, OSError):
                    header = cachefile.read_header(file)
                    memo.targets.learn(file, stat, header.key)
                    if header.picture is not None:
                        memo.learn_picture(header.source, header.picture)
