"""Facts about files and folders, remembered while their stats stay the same.

Parsing a trainer's sources and starting its Python take seconds; planning asks at most once for
each state of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from latentmake import digest

__all__ = ["Memory", "remembered"]

Stats = dict[str, list[int] | None]


class Memory(Protocol):
    """A dictionary on disk; the planner's memo is one."""

    def verdict(self, question: str) -> str | None:
        """Return the answer to a question, if any."""

    def learn_verdict(self, question: str, answer: str) -> None:
        """Remember the answer to a question."""

    def save(self) -> None:
        """Write what was learnt."""


def remembered(
    memory: Memory | None,
    question: object,
    find: Callable[[], tuple[Any, Iterable[str | os.PathLike[str]]]],
) -> Any:
    """Return a fact: the remembered one if the paths it depends on have the same stats.

    Args:
        memory: where facts are kept; None finds it anew.
        question: names the fact; a value that JSON can express.
        find: finds the fact (a value that JSON can express) and the paths it depends on.
    """
    if memory is None:
        return find()[0]
    name = digest.of_value(["remembered", 1, question])
    if (known := memory.verdict(name)) is not None:
        stats, fact = json.loads(known)
        if stats == _stats(stats):
            return fact
    fact, paths = find()
    memory.learn_verdict(name, json.dumps([_stats(os.fspath(path) for path in paths), fact]))
    memory.save()
    return fact


def _stats(paths: Iterable[str]) -> Stats:
    found: Stats = {}
    for path in paths:
        try:
            stat = os.stat(path)  # noqa: PTH116 -- hundreds of files
        except OSError:
            found[path] = None
        else:
            found[path] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return found
