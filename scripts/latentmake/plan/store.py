"""The store: cache files by key that builds replaced or removed, up to a limit in bytes.

If an edit or a setting is undone, or an item returns, a build links the files from here instead of
encoding them again. Anything in the folder, and all of it, can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile
from latentmake.index.memo import Folder, Memo
from latentmake.plan.orders import Order
from latentmake.plan.state import PartState, State

STORE = Path(".latentmake/store")
_MOST_AT_HAND = 3  # files that are tried for one target


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


# -- files at hand --------------------------------------------------------------------------------


def mark_reusable(memo: Memo, states: Iterable[State]) -> None:
    """Note for each stale target the files with the key that it needs.

    An item, a dataset or a model was renamed, an edit undone, a setting taken back. The memo tells
    of such files, none is opened, and the job checks them.
    """
    asked = [
        (state.judge, each)
        for state in states
        if state.judge is not None
        for part, each in state.parts.items()
        if each.stale and state.judge.recipes.get(part)
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
