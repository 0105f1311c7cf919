"""State of a dataset's targets: what is remembered is not judged again.

The memo keeps the listings of a dataset and of its cache folder when all was fresh. Where both are
the same, all is as it was; where they differ, only items of the files that differ are judged.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import latentmake
from latentmake import digest
from latentmake.data.item import Item
from latentmake.digest import TargetStat
from latentmake.files.workspace import is_remote
from latentmake.index.memo import Folder, Listing, packed, unpacked
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, place_of, prompt_items
from latentmake.plan.state import PartState, State

_MOST_CHANGED = 0.1  # share of the items above which all are judged
_ALWAYS = 64  # items that are few, however few there are
_CHECK = 64  # bytes of the digest before a row
_HEAD, _ENTRIES, _CACHES, _PLACES = "head", "entries", "caches", "places"  # rows of a state


def judge_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> State:
    """Return the state of some parts; of what is remembered, only what changed is judged."""
    past = Remembered(facts, dataset, model, parts)
    usual = not facts.skipped(dataset) and dataset not in facts.unreadable
    usual = usual and not facts.forced_of(dataset, model)
    if usual:
        if same := past.state():
            return same
        if changed := past.changed():
            past.keep(*changed)
            return changed[0]
    items, faults = facts.items(dataset, model)
    wanted, layout = facts.wanted_items(dataset, model), facts.layout(model)
    owned = {item.stem for item in items} | {fault.stem for fault in faults}
    if layout.flat and facts.config.datasets[dataset].on_error == "skip":
        owned = {item.stem for item in wanted}
    made = past.judged(wanted, owned, past.folder.listing())
    places = {item.stem: place_of(item, layout) for item in wanted}
    made.images = digest.of_lines(places.values())
    if usual and not faults:
        past.keep(made, places)
    return made


def judge_prompts(facts: Facts, model: str, texts: Iterable[str]) -> State:
    """Return the state of some prompts of one model; those of all its runs have an owner."""
    owned = {item.stem for item in facts.wanted_items(PROMPTS, model)}
    found = Folder(f"cache/{PROMPTS}/{model}").listing()
    items = prompt_items(texts)
    return facts.judge(PROMPTS, model, ["text"], items).judge({"text": items}, owned, found)


class Remembered:
    """The listings of a dataset and its cache folder, and the last state in which all was fresh.

    Rows of the memo hold that state; all have the same stamp. The head tells that nothing changed:
    digest of all that the state depends on besides the listings, fingerprints of these, digest of
    the images' paths, and of each part the number of targets and the digest of their keys. The
    others have both listings, each item's place (`target.place_of`) and the lines of each part
    (`PartState.lines`), and are read only where something changed.
    """

    def __init__(self, facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> None:
        self.folder = Folder(f"cache/{dataset}/{model}")
        self._facts, self._asked, self._parts = facts, (dataset, model), parts
        self._settings, self._layout = facts.config.datasets[dataset], facts.layout(model)
        self._scan = facts.scan(dataset)
        self._rows, self._name = facts.memo.snapshots, "\n".join((dataset, model, *parts))
        recipes = {part: facts.recipe_digest(dataset, model, parsed(part).kind) for part in parts}
        version = [latentmake.__version__, latentmake.PLAN_VERSION]
        base = [
            version,
            dataset,
            model,
            self._layout.name,
            recipes,
            facts.scan(dataset, "control_directory").fingerprint or None,
        ]
        self._base = digest.of_value([*base, self._settings.model_dump()])
        self._listings = self._scan.fingerprint, self.folder.fingerprint
        self._stamp: Any = None
        found = self._row(_HEAD)
        self._head: Any = found if found and found["base"] == self._base else None

    def _row(self, name: str) -> Any:
        """Return what a row holds; None where another plan has replaced the state since."""
        data = self._rows.get(self._named(name))
        stamp, found = None, None
        if data and data[:_CHECK] == digest.of_bytes(data[_CHECK:]).encode():
            stamp, found = marshal.loads(data[_CHECK:])  # noqa: S302 -- of `keep`
        self._stamp = self._stamp or stamp
        return found if stamp == self._stamp else None

    def state(self) -> State | None:
        """Return the state, where nothing changed."""
        if self._head is None or self._head["listings"] != self._listings:
            return None
        states = {
            part: PartState(fresh, lines=partial(self.lines, part), remembered=keys)
            for part, (fresh, keys) in self._head["parts"].items()
        }
        return State(states, self._head["images"])

    def lines(self, part: str, places: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return stem -> lines of its fresh targets; none where a later state replaced them."""
        places, lines = places or self._row(_PLACES), self._row(part)
        return {stem: line for stem, line in zip(places or (), lines or (), strict=False) if line}

    def keep(self, state: State, places: Mapping[str, str]) -> None:
        """Remember a state in which all is fresh; `places` are those of all items, by stem."""
        if state.unreadable or any(each.stale or each.orphans for each in state.parts.values()):
            return
        lines = {part: state.parts[part].lines() for part in self._parts}
        rows: dict[str, Any] = {
            _ENTRIES: [("", block) for block in packed(self._scan.entries)],
            _CACHES: self.folder.blocks,
            _PLACES: dict(places),
            **{part: [each.get(stem, "") for stem in places] for part, each in lines.items()},
            _HEAD: {
                "base": self._base,
                "listings": self._listings,
                "images": state.images,
                "parts": {x: (state.parts[x].fresh, state.parts[x].keys) for x in self._parts},
            },
        }
        stamp = os.urandom(16)
        for name, row in rows.items():
            # Version 2 of the format looks for no objects that are shared: it is the fastest.
            data = marshal.dumps((stamp, row), 2)
            self._rows.learn(self._named(name), None, digest.of_bytes(data).encode() + data)

    def _named(self, name: str) -> str:
        """Return a row's name in the memo; earlier releases have rows without a digest."""
        return f"{self._name}\n\n{name} with digest"

    def judged(
        self,
        items: Sequence[Item],
        owned: Collection[str],
        found: Listing,
        gone: Collection[str] | None = None,
    ) -> State:
        """Return the state of some items, of which `found` are the files that may be theirs.

        `owned` are the stems of all items, `gone` the files that are no longer there; None where
        all items are judged.
        """
        facts, layout = self._facts, self._layout
        latents = [x.inputs("latents", layout) for x in items]  # the same at each resolution
        inputs = {
            part: [x.inputs(part, layout) for x in items] if parsed(part).text else latents
            for part in self._parts
        }
        paths = None if gone is None else [*found, *gone]
        judge = facts.judge(*self._asked, self._parts, items, paths)
        if not any(parsed(part).kind == "text" for part in self._parts):  # the trainer encodes it
            for each in (x.inputs("text", layout) for x in items):
                judge.contents.of(each)
        return judge.judge(inputs, owned, found)

    # -- what changed -------------------------------------------------------------------------

    def changed(self) -> tuple[State, Mapping[str, str]] | None:
        """Return the state of all items, of which those of changed files are judged, and places.

        None where all items must be judged.
        """
        before: dict[str, str] | None = self._head and self._row(_PLACES)
        most = max(_ALWAYS, _MOST_CHANGED * len(before or ()))
        if not before or (touched := self._touched(before, most)) is None:
            return None
        (stems, caches), base, entries = touched, self._layout.base, self._scan.entries
        paths = _of_stems((path for path, *_ in entries), stems)
        items = self._facts.items_among(*self._asked, [x for x in entries if x[0] in paths])
        if items is None:
            return None
        now = {item.stem: item for item in items}
        gone, new = _of_stems(before, stems) - now.keys(), now.keys() - before.keys()
        affected = {base(stem) for stem in (*now, *gone)}
        others = {stem for stem in before if base(stem) in affected} - now.keys() - gone
        if others or len(now) + len(gone) > most or len(before) + len(new) == len(gone):
            return None
        if (gone or new) and (self._layout.external or any(x[1] < 0 for x in entries)):
            return None
        found = self._listing(affected, caches)
        state = self.judged(items, now, found, caches - found.keys())
        if state.unreadable:
            return None
        for part in self._parts:  # what is remembered of the other items comes to it
            each, known = state.parts[part], self.lines(part, before)
            (count, keys), judged = self._head["parts"][part], each.lines()
            if count and not known:
                return None
            lines = {**known, **judged}
            for stem in (now.keys() | gone) - judged.keys():
                lines.pop(stem, None)
            if lines == known:
                each.fresh, each.remembered = count, keys
            else:
                lines = dict(sorted(lines.items()))
                each.fresh = sum(line.count("\n") + 1 for line in lines.values())
            each.lines = lines.copy
        places = before | {stem: place_of(item, self._layout) for stem, item in now.items()}
        places = {stem: places[stem] for stem in sorted(places) if stem not in gone}
        state.images = digest.of_lines(places.values())
        return state, places

    def _touched(self, before: Collection[str], most: float) -> tuple[set[str], set[str]] | None:
        """Return the stems that changed files may belong to, and the changed cache files.

        None where all must be judged: an item may depend on files that do not bear its stem, too
        many files changed, or another plan has replaced the state.
        """
        settings, scan = self._settings, self._scan
        if (
            scan.items is not None
            or is_remote(scan.root)
            or settings.control_directory is not None
            or settings.metadata_file is not None
            or settings.multiple_target
            or self.folder.has_links
        ):
            return None
        changes: list[set[Any]] = []
        entries = (("", block) for block in packed(scan.entries))
        for number, (name, now) in enumerate(((_ENTRIES, entries), (_CACHES, self.folder.blocks))):
            same = self._head["listings"][number] == self._listings[number]
            if (then := () if same else self._row(name)) is None:
                return None
            changes.append(set() if same else _difference(then, now))
        files, caches = changes[0], {f"{folder}/{name}" for folder, name, *_ in changes[1]}
        if len(files) + len(caches) > most or any(size < 0 for _, _, size, *_ in files):
            return None
        if files:
            from latentmake.data.unread import in_masks  # nothing to do: no file changed

            if any(in_masks(path) for path, *_ in scan.entries):
                return None
        stems, owners = set[str](), set[str]()
        endings = [x.lower() for x in (settings.caption_extension, settings.tags_extension) if x]
        for _, path, *_ in files:
            stems.add(path.rpartition(".")[0] or path)
            stems.update(path[: -len(each)] for each in endings if path.lower().endswith(each))
        for path in caches:
            owners.update(self._layout.owners("/".join(path.split("/")[4:])))
        if owners:
            stems.update(stem for stem in before if self._layout.base(stem) in owners)
        return stems, caches

    def _listing(self, bases: Collection[str], changed: Collection[str]) -> Listing:
        """Return the files in the cache that may belong to some bases, and those that changed."""
        found: Listing = {}
        below: dict[str, set[str]] = {}
        for folder, _, name in (each.rpartition("/") for each in bases):
            below.setdefault(folder, set()).add(name)
        touched = {path.rpartition("/")[0] for path in changed}
        for place, block in self.folder.blocks:
            folder = "/".join(place.split("/")[4:])  # below that of the part
            names, inner = below.get(folder, set()), f"{folder}/" * bool(folder)
            if not names and place not in touched:
                continue
            files = unpacked(block)
            likely = [x for n in {*map(len, names)} for x in files if x[0][:n] in names]
            for file, *stat in likely:
                if any(each in bases for each in self._layout.owners(f"{inner}{file}")):
                    found[f"{place}/{file}"] = TargetStat(*stat)
            for file, *stat in files if place in touched else ():
                if f"{place}/{file}" in changed:
                    found[f"{place}/{file}"] = TargetStat(*stat)
        return found


def _difference(then: Iterable[tuple[str, bytes]], now: Iterable[tuple[str, bytes]]) -> set[Any]:
    """Return folder and entry of each file that one listing has and another one has not."""
    old, new = {*then}, {*now}
    gone, come = (
        {(folder, *file) for folder, block in several for file in unpacked(block)}
        for several in (old - new, new - old)
    )
    return gone ^ come


def _of_stems(names: Iterable[str], stems: set[str]) -> set[str]:
    """Return the names that are one of some stems or begin with one and a dot."""
    firsts = {stem.partition(".")[0] for stem in stems}
    likely = [each for each in names if each.partition(".")[0] in firsts]
    join = "{}.{}".format
    return {x for x in likely if not stems.isdisjoint(accumulate(x.split("."), join))}
