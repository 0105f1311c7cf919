"""State of a dataset's targets as it was remembered, so that only what changed is judged again.

The memo keeps the listings of a dataset and of its cache folder when nearly all was fresh. Where
both are the same, all is as it was; where they differ, only items of the files that differ are
judged. The rows are long, and a plan reads only those that it needs.
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

from latentmake.config import Dataset
from latentmake.index.listing import Folder, Listing
from latentmake.index.memo import Memo, TargetStat
from latentmake.layouts import Layout
from latentmake.plan import lock
from latentmake.plan.facts import Facts
from latentmake.plan.state import PartState, State
from latentmake.sources import s3
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
    """A state in the memo.

    Attributes:
        scan: fingerprint of the dataset's listing.
        folder: fingerprint of the cache folder's.
        images: digest of the images' paths.
        dirty: stems of items with stale targets.
        fresh: part -> number of fresh targets.
        each: part -> number of targets that each other item has; None where numbers differ.
        keys: part -> digest of all keys; None where a target is stale.
    """

    scan: str
    folder: str
    images: str
    dirty: list[str]
    fresh: dict[str, int]
    each: dict[str, int | None]
    keys: dict[str, str | None]
    memo: Memo = field(repr=False)
    name: str
    stamp: bytes
    _rows: dict[str, Any] = field(default_factory=dict, repr=False)

    def state(self, asked: Asked) -> State | None:
        """Return the state, where nothing changed and nothing was to do."""
        same = (self.scan, self.folder) == (asked.scan.fingerprint, asked.folder.fingerprint)
        if not same or self.dirty:
            return None
        parts = {
            part: PartState(fresh, lines=partial(self.lines, part), remembered=self.keys[part])
            for part, fresh in self.fresh.items()
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
    base, scan, folder, images, dirty, fresh, each, keys = _load(data)
    if base != asked.base:
        return None
    stamp = data[:_STAMP]
    return Remembered(scan, folder, images, dirty, fresh, each, keys, memo, asked.name, stamp)


def _load(data: bytes) -> Any:
    return marshal.loads(memoryview(data)[_STAMP:])  # noqa: S302 -- of the memo, written by `keep`


def keep(memo: Memo, asked: Asked, places: Mapping[str, str], state: State) -> None:
    """Remember a state where all is well with nearly all items.

    Args:
        memo: to keep it in.
        asked: the question.
        places: see `Remembered.places`.
        state: the answer.
    """
    own = {part: state.parts[part] for part in asked.parts}
    dirty = sorted({stale.item.stem for each in own.values() for stale in each.stale})
    few = len(dirty) <= _MOST_CHANGED * len(places)
    if not few or state.unreadable or any(each.orphans for each in state.parts.values()):
        return
    rows: dict[str, Any] = {
        "entries": asked.scan.entries,
        "folders": asked.folder.folders,
        "items": ([*places], [*places.values()]),
    }
    each: dict[str, int | None] = {}
    for part, its in own.items():
        lines = its.lines()
        if not lines and its.fresh:
            return
        rows[f"lines {part}"] = ["" if stem in dirty else lines.get(stem, "") for stem in places]
        each[part] = _count(lines, places.keys() - dirty)
    fresh, keys = ({part: getattr(x, of) for part, x in own.items()} for of in ("fresh", "keys"))
    listings = asked.scan.fingerprint, asked.folder.fingerprint
    head = (asked.base, *listings, state.images, dirty, fresh, each, keys)
    stamp = os.urandom(_STAMP)
    for row, value in ({"head": head} | rows).items():
        memo.snapshots.learn(f"{asked.name}\n\n{row}", None, stamp + marshal.dumps(value, 2))


def _count(lines: Mapping[str, str], stems: Collection[str]) -> int | None:
    """Return the number of lines that each of some stems has; None where numbers differ."""
    found = {lines[stem].count("\n") + 1 if stem in lines else 0 for stem in stems}
    return found.pop() if len(found) == 1 else None


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
    if len(files) + len(caches) + len(past.dirty) > most:
        return None
    bases: dict[str, list[str]] = {}
    for stem in before:
        bases.setdefault(layout.base(stem), []).append(stem)
    prefix = f"cache/{asked.dataset}/{asked.model}/"
    touched = {*past.dirty} | _stems(settings, files)
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
    for part in asked.parts:
        # The digest of all keys must be of all lines: another plan may have replaced them.
        if (all_fresh or past.each[part] is None) and past.fresh[part] and not past.lines(part):
            return None
        state.parts[part] = _together(part, state.parts[part], past, places, {*now})
    state.images = lock.images_digest(places.values())
    return state, places


def _is_simple(settings: Dataset, asked: Asked) -> bool:
    """Whether an item depends only on files whose names begin with its stem."""
    return not (
        asked.scan.rows is not None
        or s3.is_remote(asked.scan.root)
        or settings.control_directory is not None
        or settings.metadata_file is not None
        or settings.multiple_target
        or asked.folder.has_links
    )


def _together(
    part: str, state: PartState, past: Remembered, places: Mapping[str, str], now: set[str]
) -> PartState:
    """Return the state of a part, from that of some items and the remembered one of the others."""
    judged, each = state.lines(), past.each[part]
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
