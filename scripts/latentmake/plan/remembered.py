"""State of a dataset's targets as it was remembered, so that only what changed is judged again.

The memo keeps the listings of a dataset and of its cache folder when all was fresh. Where both are
the same, all is as it was; where they differ, only items of the files that differ are judged. The
rows are long, and a plan reads only those that it needs.
"""

from __future__ import annotations

import marshal
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.files.paths import is_remote
from latentmake.index.listing import Folder, Listing
from latentmake.index.memo import Memo, TargetStat
from latentmake.layouts import Layout
from latentmake.plan import lock
from latentmake.plan.facts import Facts
from latentmake.plan.state import PartState, State
from latentmake.sources.item import Item, Scan

_MOST_CHANGED = 0.1  # share of the items above which all are judged
_ALWAYS = 64  # items that are few, however few there are
_SCANNED = 8  # beginnings that are looked for one by one
_STAMP = 16  # bytes

JudgeSome = Callable[[Sequence[Item], Collection[str], Listing, Collection[str]], State]
"""Judges some items, by the stems of all, the files that may be theirs, and those that are gone."""


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
    def name(self) -> str:
        """Name of its rows in the memo."""
        return "\n".join((self.dataset, self.model, *self.parts))


@dataclass(frozen=True)
class Remembered:
    """A state in the memo, in which all was fresh.

    Attributes:
        scan: fingerprint of the dataset's listing.
        folder: fingerprint of the cache folder's.
        images: digest of the images' paths.
        parts: name -> number of targets, the number that each item has (None where numbers differ),
            and the digest of their keys.
    """

    scan: str
    folder: str
    images: str
    parts: dict[str, tuple[int, int | None, str]]
    memo: Memo = field(repr=False)
    name: str
    stamp: bytes
    _rows: dict[str, Any] = field(default_factory=dict, repr=False)

    def state(self, asked: Asked) -> State | None:
        """Return the state, where nothing changed."""
        if (self.scan, self.folder) != (asked.scan.fingerprint, asked.folder.fingerprint):
            return None
        parts = {
            part: PartState(fresh, lines=partial(self.lines, part), remembered=keys)
            for part, (fresh, _, keys) in self.parts.items()
        }
        return State(parts, self.images)

    def places(self) -> dict[str, str] | None:
        """Return stem -> where a manifest says that its pixels are, in the order of stems."""
        found = self._row("items")
        return None if found is None else dict(zip(*found, strict=True))

    def lines(self, part: str) -> dict[str, str]:
        """Return stem -> lines of its fresh targets; none where a later state replaced them."""
        stems, found = self._row("items"), self._row(f"lines {part}")
        if stems is None or found is None:
            return {}
        return {stem: line for stem, line in zip(stems[0], found, strict=True) if line}

    def changed_files(self, asked: Asked) -> set[str] | None:
        """Return the paths of sources that changed, below the root; None where one is no file."""
        if asked.scan.fingerprint == self.scan:
            return set()
        entries = self._row("entries")
        found = None if entries is None else _differing(entries, asked.scan.entries)
        if found is None or any(entry[1] < 0 for entry in found):
            return None
        return {entry[0] for entry in found}

    def changed_caches(self, asked: Asked) -> set[str] | None:
        """Return the paths of the files in the cache that changed."""
        if asked.folder.fingerprint == self.folder:
            return set()
        folders = self._row("folders")
        if folders is None:
            return None
        before, now = dict(folders), dict(asked.folder.folders)
        return {
            f"{folder}/{entry[0]}"
            for folder in before.keys() | now.keys()
            for entry in _differing(before.get(folder, []), now.get(folder, []))
        }

    def _row(self, row: str) -> Any:
        """Return a row; None where another plan has replaced the state meanwhile."""
        if row not in self._rows:
            data = self.memo.snapshots.blob(f"{self.name}\n\n{row}")
            current = data is not None and data[:_STAMP] == self.stamp
            self._rows[row] = _load(data) if data is not None and current else None
        return self._rows[row]


def _differing(some: Sequence[Any], others: Sequence[Any]) -> set[Any]:
    return set() if some == others else {*some} ^ {*others}


def recall(memo: Memo, asked: Asked) -> Remembered | None:
    """Return the state remembered for a question that differs in the listings only."""
    data = memo.snapshots.blob(f"{asked.name}\n\nhead")
    if data is None:
        return None
    base, scan, folder, images, parts = _load(data)
    if base != asked.base:
        return None
    return Remembered(scan, folder, images, parts, memo, asked.name, data[:_STAMP])


def _load(data: bytes) -> Any:
    return marshal.loads(memoryview(data)[_STAMP:])  # noqa: S302 -- of the memo, written by `keep`


def keep(memo: Memo, asked: Asked, places: Mapping[str, str], state: State) -> None:
    """Remember a state in which all is fresh; `places` are as of `Remembered.places`."""
    if state.unreadable or any(each.stale or each.orphans for each in state.parts.values()):
        return
    rows: dict[str, Any] = {
        "entries": asked.scan.entries,
        "folders": asked.folder.folders,
        "items": ([*places], [*places.values()]),
    }
    parts: dict[str, tuple[int, int | None, str | None]] = {}
    for part in asked.parts:
        its, lines = state.parts[part], state.parts[part].lines()
        rows[f"lines {part}"] = [lines.get(stem, "") for stem in places]
        numbers = {each.count("\n") + 1 if each else 0 for each in rows[f"lines {part}"]}
        parts[part] = its.fresh, numbers.pop() if len(numbers) == 1 else None, its.keys
    listings = asked.scan.fingerprint, asked.folder.fingerprint
    stamp = os.urandom(_STAMP)
    for row, value in {"head": (asked.base, *listings, state.images, parts), **rows}.items():
        memo.snapshots.learn(f"{asked.name}\n\n{row}", None, stamp + marshal.dumps(value, 2))


# -- what changed ---------------------------------------------------------------------------------


def judge_changed(
    facts: Facts, asked: Asked, past: Remembered, judge: JudgeSome
) -> tuple[State, Mapping[str, str]] | None:
    """Return the state of all items, of which those of changed files are judged.

    Args:
        facts: of dataset and model.
        asked: the question.
        past: what was remembered for it.
        judge: judges some items.

    Returns:
        The state, and the items' `Remembered.places`; None where all items must be judged.
    """
    settings, layout = facts.config.datasets[asked.dataset], facts.layout(asked.model)
    if not _is_simple(settings, asked):
        return None
    before, files, caches = past.places(), past.changed_files(asked), past.changed_caches(asked)
    if before is None or files is None or caches is None:
        return None
    most = max(_ALWAYS, _MOST_CHANGED * len(before))
    if len(files) + len(caches) > most:
        return None
    bases: dict[str, list[str]] = {}
    for stem in before:
        bases.setdefault(layout.base(stem), []).append(stem)
    prefix = f"cache/{asked.dataset}/{asked.model}/"
    touched = _stems(settings, files)
    for path in caches:
        for base in layout.owners(path[len(prefix) :].partition("/")[2]):
            touched.update(bases.get(base, ()))
    entries = [*_below(sorted(asked.scan.entries), touched, itemgetter(0))]
    items = facts.items_among(asked.dataset, asked.model, entries)
    if items is None:
        return None
    now = {item.stem: item for item in items}
    gone = set(_below(sorted(before), touched)) - now.keys()
    new = now.keys() - before.keys()
    affected = {layout.base(stem) for stem in (*now, *gone)}
    others = {stem for base in affected for stem in bases.get(base, ())} - now.keys() - gone
    odd = any(size < 0 for _, size, *_ in asked.scan.entries)
    if others or ((gone or new) and (layout.names_media or odd)):
        return None
    places = {stem: place for stem, place in before.items() if stem not in gone}
    places |= {stem: lock.place_of(item, layout) for stem, item in now.items()}
    if not places or len(now) + len(gone) > most:
        return None
    if new:
        places = dict(sorted(places.items()))
    found = _listing(asked.folder, prefix, affected, caches, layout)
    state = judge(items, {*places}, found, [path for path in caches if path not in found])
    if state.unreadable:
        return None
    all_fresh = not any(each.stale for each in state.parts.values())
    for part, (fresh, each, _) in past.parts.items():
        # The digest of all keys must be of all lines: another plan may have replaced them.
        if (all_fresh or each is None) and fresh and not past.lines(part):
            return None
        state.parts[part] = _together(part, state.parts[part], past, places, {*now})
    state.images = lock.images_digest(places.values())
    return state, places


def _is_simple(settings: Dataset, asked: Asked) -> bool:
    """Whether an item depends only on files whose names begin with its stem."""
    return not (
        asked.scan.items is not None
        or is_remote(asked.scan.root)
        or settings.control_directory is not None
        or settings.metadata_file is not None
        or settings.multiple_target
        or asked.folder.has_links
    )


def _together(
    part: str, state: PartState, past: Remembered, places: Mapping[str, str], now: set[str]
) -> PartState:
    """Return the state of a part, from that of some items and the remembered one of the others."""
    judged, each = state.lines(), past.parts[part][1]
    made: dict[str, str] = {}

    def lines() -> Mapping[str, str]:
        if not made:
            known = past.lines(part)
            found = ((stem, (judged if stem in now else known).get(stem)) for stem in places)
            made.update((stem, line) for stem, line in found if line)
        return made

    if each is None:
        fresh = sum(line.count("\n") + 1 for line in lines().values())
    else:
        fresh = state.fresh + each * (len(places) - len(now))
    return PartState(fresh, state.stale, lines=lines, orphans=state.orphans)


def _stems(settings: Dataset, paths: Iterable[str]) -> set[str]:
    """Return the stems of the items that may own some files."""
    endings = [x.lower() for x in (settings.caption_extension, settings.tags_extension) if x]
    found: set[str] = set()
    for path in paths:
        found.add(path.rpartition(".")[0] or path)
        found.update(path[: -len(each)] for each in endings if path.lower().endswith(each))
    return found


def _below(names: Sequence[Any], stems: Iterable[str], key: Any = None) -> Iterator[Any]:
    """Yield the sorted names that are one of some stems or begin with one and a dot, each once."""
    for stem in stems:
        for first, last in ((stem, f"{stem}\0"), (f"{stem}.", f"{stem}/")):
            start = bisect_left(names, first, key=key)
            yield from names[start : bisect_left(names, last, start, key=key)]


def _listing(
    folder: Folder, prefix: str, bases: set[str], changed: Collection[str], layout: Layout
) -> Listing:
    """Return the files of a cache folder that may belong to some bases, and those that changed."""
    begin: dict[str, list[str]] = {}
    for base in bases:
        below, _, name = base.rpartition("/")
        begin.setdefault(below, []).append(name)
    found: Listing = {}
    for place, entries in folder.folders:
        _, _, below = place[len(prefix) :].partition("/")
        for entry in _beginning(entries, begin.get(below, ())):
            name = f"{below}/{entry[0]}" if below else entry[0]
            if not bases.isdisjoint(layout.owners(name)):
                found[f"{place}/{entry[0]}"] = TargetStat(*entry[1:])
        if any(path.rpartition("/")[0] == place for path in changed):
            there = {f"{place}/{name}": stat for name, *stat in entries}
            found |= {path: TargetStat(*there[path]) for path in changed if path in there}
    return found


def _beginning(
    entries: Sequence[tuple[str, int, int, int]], names: Sequence[str]
) -> Iterable[tuple[str, int, int, int]]:
    """Return the files whose names begin with one of some texts."""
    if len(names) <= _SCANNED:
        first = tuple(names)
        return [entry for entry in entries if entry[0].startswith(first)] if first else []
    ordered, found = sorted(entries), {}
    for name in names:
        for entry in ordered[bisect_left(ordered, (name,)) :]:
            if not entry[0].startswith(name):
                break
            found[entry[0]] = entry
    return found.values()
