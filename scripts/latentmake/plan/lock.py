"""Lock of a run: counts and digests of what it trains on, and the items held out of training.

All items of a source (clips, resolutions, variants of its text) and all sources of equal content
are held out together. The choice depends on contents and on the number alone: not on names, order,
datasets or other settings. A source that is added or removed moves at most one other.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from latentmake import digest
from latentmake.data.item import Item
from latentmake.errors import ConfigError
from latentmake.layouts.layout import Layout

CAPTIONS = "captions"
"""Part of the texts of items, where a trainer encodes them itself."""

SALT = "latentmake validation 1"
"""Enters each source's rank, and the digest of a lock: another one would choose others."""


def run_folder(run: str) -> Path:
    """Return the folder of a run's manifest, lock and results."""
    return Path("runs") / run


@dataclass(frozen=True)
class Lock:
    """Content of `dataset.lock`.

    Attributes:
        digest: `lock_digest` of the parts and repeats.
        counts: `{dataset}/{part}` -> number of targets.
        parts: `{dataset}/{part}` -> digest of its keys.
        repeats: dataset -> `num_repeats`.
        aside: dataset -> skipped items: stem, path, digest of the faulty file, line.
        images: dataset -> digest of the places of its images (`place_of`), in the order of stems.
        manifest: digest of the manifest's bytes.
        held_out: digests of the sources held out of training.
        trained: `lock_digest` of the other items, where some are held out.
    """

    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    aside: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    manifest: str = ""
    held_out: list[str] = field(default_factory=list)
    trained: str = ""

    @property
    def data(self) -> str:
        """Digest of what trains."""
        return self.trained or self.digest

    def data_values(self) -> dict[str, object]:
        """Return all that its digest tells, by name."""
        return {
            **{f"caches of {part}": keys for part, keys in self.parts.items()},
            **{f"num_repeats of {name}": number for name, number in self.repeats.items()},
            "validation.items": len(self.held_out),
        }


def read_lock(run: str) -> Lock:
    """Read a run's lock; an empty one if it is missing or damaged."""
    try:
        return Lock(**json.loads((run_folder(run) / "dataset.lock").read_bytes()))
    except (OSError, ValueError, TypeError):
        return Lock()


def keys_digest(keys: Iterable[tuple[str, str]]) -> str:
    """Return the digest of (stem, key) pairs in the order of their stems."""
    return digest.of_lines(f"{stem}\t{key}" for stem, key in keys)


def place_of(item: Item, layout: Layout) -> str:
    """Return what a manifest says of where the pixels of an item are."""
    span, row = item.span, item.row  # beside: a Wan model's control has the name of its image
    beside = [*item.controls, *item.layers] if layout.numbered_controls else []
    if span is None and row is None and not beside:
        return item.image
    return json.dumps([item.image, span, row, *([beside] if beside else [])])


def lock_digest(parts: Mapping[str, str], repeats: Mapping[str, int], validation: int = 0) -> str:
    """Return the digest of `{dataset}/{part}` -> `keys_digest` and dataset -> `num_repeats`.

    With `validation`, the number of sources held out, it tells these too: keys hold the digests of
    sources, by which they are chosen.
    """
    held = [[SALT, validation]] if validation else []
    return digest.of_value([dict(parts), dict(repeats), *held])


def chosen(contents: Iterable[str], count: int) -> set[str]:
    """Return those of some digests of sources that are held out: `count` different ones.

    They have the smallest digests of salt and content.
    """
    ranks = {digest.of_bytes(f"{SALT}\n{each}".encode()): each for each in contents}
    return {ranks[each] for each in heapq.nsmallest(count, ranks)}


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
