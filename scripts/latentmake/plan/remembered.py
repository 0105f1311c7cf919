"""State of a dataset's targets, without judging again what the memo remembers.

When all targets are fresh, the memo keeps the listings of the dataset and of its cache folder. If
both are the same today, all targets still are fresh. If some files differ, only the items of these
files are judged.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import latentmake
from latentmake.base import digest
from latentmake.base.digest import TargetStat
from latentmake.base.paths import is_remote
from latentmake.config.root import Config
from latentmake.data.item import Item
from latentmake.data.memo import Folder, Listing, Memo, packed, unpacked
from latentmake.layouts.layout import CAPTIONS, kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge, PartState, State
from latentmake.plan.orders import PROMPTS, Part, place_of, prompt_items

_MOST_CHANGED = 0.1  # largest share of changed items; above it, all items are judged
_ALWAYS = 64  # so many changed items are judged separately, even in a small dataset
_CHECK = 64  # bytes of the digest that stands before a row
_HEAD, _ENTRIES, _CACHES, _PLACES = "head", "entries", "caches", "places"  # rows of a state


def judge_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> State:
    """Return the state of some parts; if a state is remembered, judge only the changed items."""
    past = Remembered(facts, dataset, model, parts)
    usual = not facts.skipped(dataset, model) and dataset not in facts.unreadable
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
    if model == CAPTIONS:  # a made caption waits for the day when that of a person is deleted
        owned |= facts.stems(dataset)
    made = past.judged(wanted, owned, past.folder.listing())
    places = {item.stem: place_of(item, layout) for item in wanted}
    made.images = digest.of_lines(places.values())
    if usual and not faults:
        past.keep(made, places)
    return made


def judge_prompts(facts: Facts, model: str, texts: Iterable[str]) -> State:
    """Return the state of some prompts of one model; no prompt of any run is an orphan."""
    owned = {item.stem for item in facts.wanted_items(PROMPTS, model)}
    listing = Folder(f"cache/{PROMPTS}/{model}").listing()
    items = prompt_items(texts)
    judge = Judge(facts, PROMPTS, model, ["text"], items)
    return judge.judge({"text": items}, owned, listing)


def facts_with(config: Config, memo: Memo, **options: Any) -> Facts:
    """Return facts that judge made captions; `options` are further arguments of `Facts`."""

    def recipe(*section: Any, **more: Any) -> dict[str, object]:
        from latentmake.models import captioner_recipe  # few projects have captioners

        return captioner_recipe.make(*section, **more)

    return Facts(config, memo, judge_captions=judge_captions, caption_recipe=recipe, **options)


def judge_captions(facts: Facts, dataset: str) -> State:
    """Return the state of a dataset's made captions."""
    return judge_dataset(facts, dataset, CAPTIONS, [*facts.config.datasets[dataset].captioner])


class Remembered:
    """The listings of a dataset and its cache folder, and the last state in which all was fresh.

    Rows of the memo hold that state. All rows of one state have the same stamp. One row, the head,
    is enough to tell that nothing changed. It has the digest of everything else that the state
    depends on, the fingerprints of both listings, the digest of the items' places, and for each
    part the number of targets and the digest of their keys. The other rows have both listings, the
    items' places (`orders.place_of`) and the lines of each part (`PartState.lines`). They are read
    only if something changed.
    """

    def __init__(self, facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> None:
        is_captions = model == CAPTIONS
        self.folder = (
            facts.captions_folder(dataset) if is_captions else Folder(f"cache/{dataset}/{model}")
        )
        self._facts, self._place, self._parts = facts, (dataset, model), parts
        self._settings, self._layout = facts.config.datasets[dataset], facts.layout(model)
        self._scan = facts.scan(dataset)
        self._rows, self._name = facts.memo.snapshots, "\n".join((dataset, model, *parts))
        self._lines = " lines" if is_captions else ""  # a captioner may be called `head`
        base: list[object] = [
            [latentmake.__version__, latentmake.PLAN_VERSION],
            dataset,
            model,
            self._layout.name,
            {part: facts.recipe_digest(Part(dataset, model, part)) for part in parts},
            facts.scan(dataset, "control_directory").fingerprint or None,
            self._settings.model_dump(),
        ]
        if self._settings.captioner and model != CAPTIONS:
            base.append(facts.captions_mark(dataset))
        self._base = digest.of_value(base)
        self._listings = self._scan.fingerprint, self.folder.fingerprint
        self._stamp: Any = None
        head = self._row(_HEAD)
        self._head: Any = head if head and head["base"] == self._base else None

    def _row(self, name: str) -> Any:
        """Return the content of a row; None if it is missing or of a later plan's state."""
        data = self._rows.get(self._named(name))
        stamp, content = None, None
        if data and data[:_CHECK] == digest.of_bytes(data[_CHECK:]).encode():
            stamp, content = marshal.loads(data[_CHECK:])  # noqa: S302 -- of `keep`
        self._stamp = self._stamp or stamp
        return content if stamp == self._stamp else None

    def state(self) -> State | None:
        """Return the remembered state; None if something changed."""
        if self._head is None or self._head["listings"] != self._listings:
            return None
        states = {
            part: PartState(fresh, lines=partial(self.lines, part), remembered=keys)
            for part, (fresh, keys) in self._head["parts"].items()
        }
        return State(states, self._head["images"])

    def lines(self, part: str, places: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return stem -> lines of its fresh targets; empty if a later state replaced them."""
        places, lines = places or self._row(_PLACES), self._row(f"{part}{self._lines}")
        return {stem: line for stem, line in zip(places or (), lines or (), strict=False) if line}

    def keep(self, state: State, places: Mapping[str, str]) -> None:
        """Remember a state if all is fresh in it; `places` has the place of each item, by stem."""
        if state.unreadable or any(part.stale or part.orphans for part in state.parts.values()):
            return
        lines = {part: state.parts[part].lines() for part in self._parts}
        rows: dict[str, Any] = {
            _ENTRIES: [("", block) for block in packed(self._scan.entries)],
            _CACHES: self.folder.blocks,
            _PLACES: dict(places),
            **{
                f"{part}{self._lines}": [of_stem.get(stem, "") for stem in places]
                for part, of_stem in lines.items()
            },
            _HEAD: {
                "base": self._base,
                "listings": self._listings,
                "images": state.images,
                "parts": {
                    part: (state.parts[part].fresh, state.parts[part].keys) for part in self._parts
                },
            },
        }
        stamp = os.urandom(16)
        for name, row in rows.items():
            # Version 2 of the format is the fastest: it does not look for shared objects.
            data = marshal.dumps((stamp, row), 2)
            self._rows.learn(self._named(name), None, digest.of_bytes(data).encode() + data)

    def _named(self, name: str) -> str:
        """Return a row's name in the memo; earlier releases, without digest, have other names."""
        return f"{self._name}\n\n{name} with digest"

    def judged(
        self,
        items: Sequence[Item],
        owned: Collection[str],
        listing: Listing,
        gone: Collection[str] | None = None,
    ) -> State:
        """Return the state of some items.

        `owned` has the stems of all items, `listing` the cache files that may belong to `items`.
        `gone` are the cache files that no longer exist; None if all items are judged.
        """
        facts, layout = self._facts, self._layout
        latents = [item.inputs("latents", layout) for item in items]  # the same at each resolution
        texts = [part for part in self._parts if kind_of(part) != "latents"]
        inputs = dict.fromkeys(self._parts, latents)
        inputs |= {part: [item.inputs(part, layout) for item in items] for part in texts}
        paths = None if gone is None else [*listing, *gone]
        judge = Judge(facts, *self._place, self._parts, items, paths)
        if not texts:
            # The trainer encodes the texts itself; an unreadable caption is a fault nevertheless.
            for text_inputs in (item.inputs("text", layout) for item in items):
                if not text_inputs.awaits_caption:
                    judge.contents.of(text_inputs)
        return judge.judge(inputs, owned, listing)

    # -- what changed -------------------------------------------------------------------------

    def changed(self) -> tuple[State, Mapping[str, str]] | None:
        """Judge the items of changed files only; return the state of all items, and their places.

        Return None if all items must be judged: items may depend on files with other names, too
        many files changed, or another plan has replaced the remembered state.
        """
        before: dict[str, str] | None = self._head and self._row(_PLACES)
        if not before or self._has_shared_files or (changes := self._changes()) is None:
            return None
        (files, caches), most = changes, max(_ALWAYS, _MOST_CHANGED * len(before))
        if len(files) + len(caches) > most or self._affect_others(files):
            return None
        stems = self._stems(files, caches, before)
        paths = _of_stems((path for path, *_ in self._scan.entries), stems)
        entries = [entry for entry in self._scan.entries if entry[0] in paths]
        if (items := self._facts.items_among(*self._place, entries)) is None:
            return None
        base, now = self._layout.base, {item.stem: item for item in items}
        gone = _of_stems(before, stems) - now.keys()
        others = before.keys() - now.keys() - gone
        affected = {base(stem) for stem in (*now, *gone)}
        shares_caches = any(base(stem) in affected for stem in others)
        is_large, is_empty = len(now) + len(gone) > most, not (now or others)
        if shares_caches or is_large or is_empty:
            return None
        if (gone or now.keys() - before.keys()) and (
            self._layout.external or any(size < 0 for _, size, *_ in self._scan.entries)
        ):
            return None
        listing = self._listing(affected, caches)
        owned = {*now}
        if self._place[1] == CAPTIONS and entries:  # also items whose caption a person wrote
            owned |= self._facts.stems(self._place[0], entries)
        state = self.judged(items, owned, listing, caches - listing.keys())
        if state.unreadable or not self._add_others(state, before, now.keys() | gone):
            return None
        places = before | {stem: place_of(item, self._layout) for stem, item in now.items()}
        places = {stem: places[stem] for stem in sorted(places) if stem not in gone}
        state.images = digest.of_lines(places.values())
        return state, places

    @property
    def _has_shared_files(self) -> bool:
        """Whether items may depend on files with other names."""
        settings, scan = self._settings, self._scan
        return (
            scan.items is not None
            or is_remote(scan.root)
            or settings.control_directory is not None
            or settings.metadata_file is not None
            or bool(settings.multiple_target)
            or self.folder.has_links
        )

    def _affect_others(self, files: Collection[tuple[Any, ...]]) -> bool:
        """Return whether changed files may affect items with other names."""
        if not files:
            return False
        # Imported here, because a build with nothing to do does not need it.
        from latentmake.data.unread import in_masks

        is_unreadable = any(size < 0 for _, _, size, *_ in files)
        return is_unreadable or any(in_masks(path) for path, *_ in self._scan.entries)

    def _changes(self) -> tuple[set[Any], set[str]] | None:
        """Return the changed files and caches; None if another plan has replaced the state."""
        changes: list[set[Any]] = []
        entries = (("", block) for block in packed(self._scan.entries))
        for number, (name, now) in enumerate(((_ENTRIES, entries), (_CACHES, self.folder.blocks))):
            same = self._head["listings"][number] == self._listings[number]
            if (then := () if same else self._row(name)) is None:
                return None
            changes.append(set() if same else _difference(then, now))
        return changes[0], {f"{folder}/{name}" for folder, name, *_ in changes[1]}

    def _stems(
        self, files: Iterable[tuple[Any, ...]], caches: Iterable[str], before: Iterable[str]
    ) -> set[str]:
        """Return the stems that changed files and caches may belong to."""
        stems, owners = set[str](), set[str]()
        extensions = (self._settings.caption_extension, self._settings.tags_extension)
        endings = [extension.lower() for extension in extensions if extension]
        for _, path, *_ in files:
            stems.add(path.rpartition(".")[0] or path)
            stems.update(path[: -len(end)] for end in endings if path.lower().endswith(end))
        for path in caches:
            owners.update(self._layout.owners("/".join(path.split("/")[4:])))
        if owners:
            stems.update(stem for stem in before if self._layout.base(stem) in owners)
        return stems

    def _add_others(self, state: State, before: Mapping[str, str], judged: set[str]) -> bool:
        """Add the remembered lines of the items that are not judged; return False if none exist."""
        for part in self._parts:
            part_state, old_lines = state.parts[part], self.lines(part, before)
            (count, keys), new_lines = self._head["parts"][part], part_state.lines()
            if count and not old_lines:
                return False
            lines = {**old_lines, **new_lines}
            for stem in judged - new_lines.keys():
                lines.pop(stem, None)
            if lines == old_lines:
                part_state.fresh, part_state.remembered = count, keys
            else:
                lines = dict(sorted(lines.items()))
                part_state.fresh = sum(line.count("\n") + 1 for line in lines.values())
            part_state.lines = lines.copy
        return True

    def _listing(self, bases: Collection[str], changed: Collection[str]) -> Listing:
        """Return the cache files that may belong to bases (`Layout.base`), and changed ones."""
        listing: Listing = {}
        below: dict[str, set[str]] = {}
        for folder, _, name in (base.rpartition("/") for base in bases):
            below.setdefault(folder, set()).add(name)
        touched = {path.rpartition("/")[0] for path in changed}
        for place, block in self.folder.blocks:
            folder = "/".join(place.split("/")[4:])  # path below the part's folder
            names, inner = below.get(folder, set()), f"{folder}/" if folder else ""
            if not names and place not in touched:
                continue
            files = unpacked(block)
            lengths = {*map(len, names)}
            likely = [file for length in lengths for file in files if file[0][:length] in names]
            for file, *stat in likely:
                if any(base in bases for base in self._layout.owners(f"{inner}{file}")):
                    listing[f"{place}/{file}"] = TargetStat(*stat)
            for file, *stat in files if place in touched else ():
                if f"{place}/{file}" in changed:
                    listing[f"{place}/{file}"] = TargetStat(*stat)
        return listing


def _difference(then: Iterable[tuple[str, bytes]], now: Iterable[tuple[str, bytes]]) -> set[Any]:
    """Return folder and entry of each file that is in one of two listings only."""
    old, new = {*then}, {*now}
    gone, come = (
        {(folder, *file) for folder, block in several for file in unpacked(block)}
        for several in (old - new, new - old)
    )
    return gone ^ come


def _of_stems(names: Iterable[str], stems: set[str]) -> set[str]:
    """Return the names that equal one of the stems, or begin with a stem and a dot."""
    firsts = {stem.partition(".")[0] for stem in stems}
    likely = [name for name in names if name.partition(".")[0] in firsts]
    join = "{}.{}".format
    return {name for name in likely if not stems.isdisjoint(accumulate(name.split("."), join))}
