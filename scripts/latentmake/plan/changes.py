"""Evaluation of what changed since a snapshot, as if all had been evaluated.

Of a dataset whose items depend on their own files alone. Where anything is unusual there is no
answer: then all is evaluated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.index.memo import TargetStat
from latentmake.layouts import Layout
from latentmake.plan import manifest
from latentmake.plan.facts import Facts
from latentmake.plan.listing import Folder, Listing
from latentmake.plan.snapshots import MOST_CHANGED, Asked, Snapshot
from latentmake.plan.staleness import Evaluation, PartState
from latentmake.sources import s3
from latentmake.sources.items import Item

_ALWAYS = 64  # items that are few, however few there are
_SCANNED = 8  # beginnings that are looked for one by one

_Evaluate = Callable[[Sequence[Item], set[str], Listing, Collection[str]], Evaluation]


def changed(
    facts: Facts, asked: Asked, snapshot: Snapshot, evaluate: _Evaluate
) -> tuple[Evaluation, Mapping[str, str]] | None:
    """Return the state of all items, of which those of changed files are evaluated.

    Args:
        facts: of dataset and model.
        asked: the question.
        snapshot: the latest for it.
        evaluate: evaluates some items, by the stems of all, the files that may be of these items,
            and those that are gone.

    Returns:
        The state, and stem of each item -> its image as a manifest has it; None where all items
        must be evaluated.
    """
    settings, layout = facts.config.datasets[asked.dataset], facts.layout(asked.model)
    if not _is_simple(settings, asked):
        return None
    before, files = snapshot.places, _changed_files(asked, snapshot)
    caches = _changed_caches(asked, snapshot)
    if before is None or files is None or caches is None:
        return None
    most = max(_ALWAYS, MOST_CHANGED * len(before))
    if len(files) + len(caches) + len(snapshot.dirty) > most:
        return None
    touched = {*snapshot.dirty} | _stems(settings, files)
    bases: dict[str, list[str]] = {}
    for stem in before:
        bases.setdefault(layout.base(stem), []).append(stem)
    prefix = f"cache/{asked.dataset}/{asked.model}/"
    for path in caches:
        for base in layout.owners(path[len(prefix) :].partition("/")[2]):
            touched.update(bases.get(base, ()))
    items = _items(facts, asked, touched)
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
    places |= {stem: manifest.place_of(x, x.image, layout) for stem, x in now.items()}
    if not places or len(now) + len(gone) > most:
        return None
    if new:
        places = dict(sorted(places.items()))
    found = _listing(asked.folder, prefix, affected, caches, layout)
    state = evaluate(items, {*places}, found, [path for path in caches if path not in found])
    if state.unreadable:
        return None
    all_fresh = not any(each.stale for each in state.parts.values())
    for part in asked.parts:
        # The digest of all keys is remembered: it must be of all lines. Another plan that runs
        # beside this one may have replaced the snapshot meanwhile.
        needed = all_fresh or snapshot.counts[part] is None
        if needed and snapshot.lines(part) is None:
            return None
        state.parts[part] = _joined(part, state.parts[part], snapshot, places, {*now})
    state.images = manifest.images_digest(places.values())
    return state, places


def _is_simple(settings: Dataset, asked: Asked) -> bool:
    """Whether an item depends on files alone that begin with its stem."""
    return not (
        asked.scan.rows is not None
        or s3.is_remote(asked.scan.root)
        or settings.control_directory is not None
        or settings.metadata_file is not None
        or settings.multiple_target
        or asked.folder.has_links
    )


# -- what differs ---------------------------------------------------------------------------------


def _changed_files(asked: Asked, snapshot: Snapshot) -> set[str] | None:
    """Return the paths of sources that changed, below the root; None where one is no file."""
    if asked.scan.fingerprint == snapshot.scan:
        return set()
    entries = snapshot.entries
    if entries is None:
        return None
    found = _differing(entries, asked.scan.entries)
    return None if any(entry[1] < 0 for entry in found) else {entry[0] for entry in found}


def _changed_caches(asked: Asked, snapshot: Snapshot) -> set[str] | None:
    """Return the paths of the files in the cache that changed."""
    if asked.folder.fingerprint == snapshot.folder:
        return set()
    folders = snapshot.folders
    if folders is None:
        return None
    before, now = dict(folders), dict(asked.folder.folders)
    return {
        f"{folder}/{entry[0]}"
        for folder in before.keys() | now.keys()
        for entry in _differing(before.get(folder, []), now.get(folder, []))
    }


def _differing(some: Sequence[Any], others: Sequence[Any]) -> set[Any]:
    return set() if some == others else {*some} ^ {*others}


def _stems(settings: Dataset, paths: Iterable[str]) -> set[str]:
    """Return the stems of the items that may own some files."""
    endings = [
        each.lower() for each in (settings.caption_extension, settings.tags_extension) if each
    ]
    found: set[str] = set()
    for path in paths:
        found.add(path.rpartition(".")[0] or path)
        found.update(path[: -len(each)] for each in endings if path.lower().endswith(each))
    return found


# -- items and files of some stems ----------------------------------------------------------------


def _items(facts: Facts, asked: Asked, touched: Collection[str]) -> list[Item] | None:
    """Return the items with some stems, or stems that begin with one and a dot."""
    names = sorted(asked.scan.entries)
    entries = list(_below(names, touched, itemgetter(0)))
    return facts.items_among(asked.dataset, asked.model, entries)


def _below(names: Sequence[Any], stems: Iterable[str], key: Any = None) -> Iterator[Any]:
    """Yield the sorted names that are one of some stems or begin with one and a dot, each once."""
    for stem in stems:
        for first, last in ((stem, f"{stem}\0"), (f"{stem}.", f"{stem}/")):
            start = bisect_left(names, first, key=key)
            yield from names[start : bisect_left(names, last, start, key=key)]


def _listing(
    folder: Folder,
    prefix: str,
    bases: set[str],
    changed: Collection[str],
    layout: Layout,
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
    return found | _stats(folder, changed)


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


def _stats(folder: Folder, paths: Collection[str]) -> Listing:
    """Return the stats of some files, as far as they are there."""
    names: dict[str, set[str]] = {}
    for path in paths:
        place, _, name = path.rpartition("/")
        names.setdefault(place, set()).add(name)
    return {
        f"{place}/{entry[0]}": TargetStat(*entry[1:])
        for place, entries in folder.folders
        if place in names
        for entry in entries
        if entry[0] in names[place]
    }


# -- state of all items ---------------------------------------------------------------------------


def _joined(
    part: str, state: PartState, snapshot: Snapshot, places: Mapping[str, str], now: set[str]
) -> PartState:
    """Return the state of a part, from that of some items and the snapshot of the others."""
    evaluated = state.lines()

    @cache
    def lines() -> Mapping[str, str]:
        known = snapshot.lines(part) or {}
        found = {stem: evaluated.get(stem) if stem in now else known.get(stem) for stem in places}
        return {stem: line for stem, line in found.items() if line}

    count = snapshot.counts[part]
    if count is None:
        fresh = sum(line.count("\n") + 1 for line in lines().values())
    else:
        fresh = state.fresh + count * (len(places) - len(now))
    return PartState(fresh, state.stale, lines=lines, orphans=state.orphans)
