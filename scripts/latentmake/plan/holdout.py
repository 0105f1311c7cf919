"""Items held out of training for validation: whole sources, chosen by their content's digest.

All items of a source (clips, resolutions, variants of its text) and all sources of equal content
are on the same side. The choice depends on contents and on the number alone: not on names, order,
datasets or other settings. A source that is added or removed moves at most one other.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from latentmake import digest
from latentmake.errors import ConfigError

SALT = "latentmake validation 1"
"""Enters each source's rank, and the digest of a lock: another one would choose others."""


def chosen(contents: Iterable[str], count: int) -> set[str]:
    """Return the contents held out: the `count` with the smallest digests of salt and content.

    Args:
        contents: digests of all sources; equal ones count once.
        count: number of sources to hold out.
    """
    return set(heapq.nsmallest(count, set(contents), key=_rank))


def _rank(content: str) -> str:
    return digest.of_bytes(f"{SALT}\n{content}".encode())


def refuse_too_many(run: str, count: int, sources: Collection[str]) -> None:
    """Refuse to hold out more than half of a run's sources.

    Args:
        run: its name.
        count: number of sources to hold out.
        sources: paths, or digests of content; equal ones count once.

    Raises:
        ConfigError: they are more.
    """
    there = len(set(sources))
    if count > there // 2:
        hint = f"set it to {there // 2} or less" if there > 1 else "leave out `validation`"
        raise ConfigError(
            f"{count} of {there} different sources would be held out, more than half of them",
            where=f"runs.{run}.validation.items",
            hint=hint,
        )
