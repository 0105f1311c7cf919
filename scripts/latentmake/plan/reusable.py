"""Files at hand: in the store, or in the cache under other names, with the key of a stale target.

An item, a dataset or a model that was renamed, an edit that was undone, a setting that was taken
back. Planning finds such files through the memo and opens none; the job checks them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from latentmake.errors import CacheError
from latentmake.files.cachefile import read_header
from latentmake.index.listing import Folder
from latentmake.index.memo import Memo
from latentmake.plan import store
from latentmake.plan.state import State

_MOST_AT_HAND = 3  # files that are tried for one target


def mark_reusable(memo: Memo, states: Iterable[State]) -> None:
    """Note for each stale target the files with the key that it needs."""
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
    kept = store.keys()
    if not kept and not memo.targets.any():
        return
    for judge in {id(each): each for each, _ in asked}.values():
        judge.contents.prepare_presumed(
            stale.item for other, state in asked if other is judge for stale in state.stale
        )
    wanted = [
        (state, number, judge.presumed(stale))
        for judge, state in asked
        for number, stale in enumerate(state.stale)
    ]
    found = _files({key for _, _, keys in wanted for key in keys}, memo, kept)
    for state, number, keys in wanted:
        if paths := [path for key in keys for path in found.get(key, ())]:
            stale = state.stale[number]
            target = stale.target._replace(at_hand=tuple(paths[:_MOST_AT_HAND]))
            state.stale[number] = stale._replace(reason="reusable", target=target)


def _files(keys: set[str], memo: Memo, kept: set[str]) -> dict[str, list[str]]:
    """Return key -> the files with that key."""
    found = {key: [str(store.stored(key))] for key in keys & kept}
    gone = []
    for path, stat, key in sorted(memo.targets.where("value", keys)):
        try:
            if os.lstat(path).st_size == stat.size:
                found.setdefault(key, []).append(path)
        except OSError:
            gone.append(path)
    memo.targets.forget(gone)
    return found


def _learn_unknown(memo: Memo) -> None:
    """Read the headers of those cache folders of which the memo knows nothing: it was deleted."""
    for path in _folders("cache"):
        for folder in _folders(path):
            if memo.targets.any(folder):
                continue
            with contextlib.suppress(CacheError):
                for file, stat in Folder(folder).listing().items():
                    with contextlib.suppress(CacheError, OSError):
                        header = read_header(file)
                        memo.targets.learn(file, stat, header.key)
                        if header.picture is not None:
                            memo.learn_picture(header.source, header.picture)


def _folders(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as found:
        return [entry.path for entry in found if entry.is_dir()]
    return []
