"""Files at hand: in the store, or in the cache under other names.

An item, a dataset or a model that was renamed, an edit that was undone, a setting that was taken
back: the key of a stale target may stand in some file already. Planning finds such files through
the memo and opens none; the job checks their headers, and encodes where one has another key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from latentmake.errors import CacheError
from latentmake.files.cachefile import read_header
from latentmake.index.listing import Folder
from latentmake.index.memo import Memo
from latentmake.plan import store
from latentmake.plan.staleness import Evaluation

_MOST = 3  # files that are tried for one target


def mark(memo: Memo, evaluations: Sequence[Evaluation]) -> None:
    """Note for each stale target the files at hand with the key that it needs.

    Args:
        memo: what is known of files.
        evaluations: their stale targets get `at_hand`.
    """
    asked = [
        (keys, part, state)
        for keys, parts in ((each.keys, each.parts) for each in evaluations)
        if keys is not None
        for part, state in parts.items()
        if state.stale and keys.recipes.get(part)
    ]
    if not asked:
        return
    _learn_unknown(memo)
    kept = store.keys()
    if not kept and not memo.targets.any():
        return
    for keys in {id(each): each for each, _, _ in asked}.values():
        keys.prepare_presumed(
            stale.source for other, _, state in asked if other is keys for stale in state.stale
        )
    wanted = [
        (state, number, keys.presumed(part, stale.source, stale.clip))
        for keys, part, state in asked
        for number, stale in enumerate(state.stale)
    ]
    found = _files({key for _, _, each in wanted for key in each}, memo, kept)
    for state, number, each in wanted:
        if paths := [path for key in each for path in found.get(key, ())]:
            stale = state.stale[number]
            state.stale[number] = stale._replace(reason="reusable", at_hand=tuple(paths[:_MOST]))


def _files(keys: set[str], memo: Memo, kept: set[str]) -> dict[str, list[str]]:
    """Return key -> the files at hand with that key."""
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
