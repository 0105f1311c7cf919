"""Facts about several files and folders, remembered as long as the stats of all are the same."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from latentmake import digest
from latentmake.index.memo import Memo, target_stat


def remembered(
    memo: Memo | None,
    question: object,
    find: Callable[[], tuple[Any, Iterable[str | os.PathLike[str]]]],
) -> Any:
    """Return a fact about files and folders, found anew only if one of their stats is new.

    Parsing an external program's sources and starting its Python take seconds. `question` names the
    fact; `find` returns it with the paths it depends on. Question and fact are JSON values.
    """
    if memo is None:
        return find()[0]
    name = digest.of_value(["remembered", 1, question])
    if (known := memo.verdict(name)) is not None:
        stats, fact = json.loads(known)
        if stats == _stats(stats):
            return fact
    fact, paths = find()
    memo.learn_verdict(name, json.dumps([_stats(os.fspath(path) for path in paths), fact]))
    return fact


def _stats(paths: Iterable[str]) -> dict[str, list[int] | None]:
    found: dict[str, list[int] | None] = {}
    for path in paths:
        found[path] = None
        with contextlib.suppress(OSError):
            found[path] = list(target_stat(os.stat(path)))  # noqa: PTH116 -- hundreds of files
    return found
