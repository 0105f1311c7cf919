"""Snapshots: the listings of a dataset and of its cache folder when nearly all was fresh.

The next plan evaluates the items of those files alone that differ from them. The memo keeps a
snapshot in rows, of which a plan reads what it needs: the listings are long.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from latentmake import digest
from latentmake.index.listing import Folder
from latentmake.index.memo import Memo
from latentmake.plan.staleness import Evaluation
from latentmake.sources.items import Scan

MOST_CHANGED = 0.1
"""Share of the items above which all are evaluated."""

_STAMP = 16  # bytes


@dataclass(frozen=True)
class Asked:
    """Question for the state of some parts of a dataset and model.

    Attributes:
        base: digest of all that the answer depends on besides the two listings.
        scan: listing of the dataset.
        folder: listing of the cache folder.
    """

    dataset: str
    model: str
    parts: tuple[str, ...]
    base: str
    scan: Scan
    folder: Folder

    @property
    def question(self) -> str:
        """Digest of all that the answer depends on."""
        return digest.of_value([self.base, self.scan.fingerprint, self.folder.fingerprint])

    @property
    def name(self) -> str:
        """Name of the snapshot."""
        return "\n".join((self.dataset, self.model, *self.parts))


@dataclass(frozen=True)
class Snapshot:
    """A snapshot in the memo.

    Attributes:
        scan: fingerprint of the dataset's listing.
        folder: fingerprint of the cache folder's.
        dirty: stems of items with stale targets.
        counts: part -> number of targets that each other item has; None where numbers differ.
    """

    scan: str
    folder: str
    dirty: list[str]
    counts: dict[str, int | None]
    _memo: Memo = field(repr=False)
    _name: str
    _stamp: bytes
    _lines: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    @property
    def entries(self) -> list[tuple[str, int, int, int, int]] | None:
        """Entries of the dataset's listing; as all rows None where a later snapshot replaced it."""
        found: list[tuple[str, int, int, int, int]] | None = self._row("entries")
        return found

    @property
    def folders(self) -> list[tuple[str, list[tuple[str, int, int, int]]]] | None:
        """Folders of the cache with their files."""
        found: list[tuple[str, list[tuple[str, int, int, int]]]] | None = self._row("folders")
        return found

    @property
    def places(self) -> dict[str, str] | None:
        """Stem of each item -> its image as a manifest has it, in the order of stems."""
        found = self._row("items")
        return None if found is None else dict(zip(*found, strict=True))

    def lines(self, part: str) -> dict[str, str] | None:
        """Return stem -> lines of its fresh targets; None where a later snapshot replaced them."""
        if part not in self._lines:
            stems, found = self._row("items"), self._row(f"lines {part}")
            if stems is None or found is None:
                return None
            pairs = zip(stems[0], found, strict=True)
            self._lines[part] = {stem: line for stem, line in pairs if line}
        return self._lines[part]

    def lines_of(self, asked: Asked) -> Callable[[str], Mapping[str, str]] | None:
        """Return `lines`, where the snapshot is of the very listings of a question."""
        same = (self.scan, self.folder) == (asked.scan.fingerprint, asked.folder.fingerprint)
        return (lambda part: self.lines(part) or {}) if same and not self.dirty else None

    def _row(self, row: str) -> Any:
        data = self._memo.snapshots.blob(f"{self._name}\n\n{row}")
        if data is None or data[:_STAMP] != self._stamp:
            return None
        return _load(data)


def latest(memo: Memo, asked: Asked) -> Snapshot | None:
    """Return the snapshot for a question, if there is one that differs in the listings alone."""
    data = memo.snapshots.blob(f"{asked.name}\n\nhead")
    if data is None:
        return None
    base, scan, folder, dirty, counts = _load(data)
    if base != asked.base:
        return None
    return Snapshot(scan, folder, dirty, counts, memo, asked.name, data[:_STAMP])


def _load(data: bytes) -> Any:
    return marshal.loads(memoryview(data)[_STAMP:])  # noqa: S302 -- of the memo, written by `keep`


def keep(memo: Memo, asked: Asked, places: Mapping[str, str], state: Evaluation) -> None:
    """Keep a snapshot where all is well with nearly all items.

    Args:
        memo: to keep it in.
        asked: the question.
        places: stem of each item -> its image as a manifest has it, in the order of stems.
        state: the answer.
    """
    dirty = {stale.source.stem for part in asked.parts for stale in state.parts[part].stale}
    if len(dirty) > MOST_CHANGED * len(places):
        return
    if state.unreadable or any(each.orphans for each in state.parts.values()):
        return
    rows: dict[str, Any] = {
        "entries": asked.scan.entries,
        "folders": asked.folder.folders,
        "items": ([*places], [*places.values()]),
    }
    counts: dict[str, int | None] = {}
    for part in asked.parts:
        lines = state.parts[part].lines()
        if not lines and state.parts[part].fresh:
            return
        rows[f"lines {part}"] = ["" if stem in dirty else lines.get(stem, "") for stem in places]
        counts[part] = _count(lines, places.keys() - dirty)
    head = (asked.base, asked.scan.fingerprint, asked.folder.fingerprint, sorted(dirty), counts)
    stamp = os.urandom(_STAMP)
    for row, value in ({"head": head} | rows).items():
        memo.snapshots.learn(f"{asked.name}\n\n{row}", None, stamp + marshal.dumps(value, 2))


def _count(lines: Mapping[str, str], stems: Collection[str]) -> int | None:
    """Return the number of lines that each of some stems has; None where numbers differ."""
    found = {lines[stem].count("\n") + 1 if stem in lines else 0 for stem in stems}
    return found.pop() if len(found) == 1 else None
