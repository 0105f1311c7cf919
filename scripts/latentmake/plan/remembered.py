"""State of a dataset's targets: what is remembered is not judged again.

The memo keeps the listings of a dataset and of its cache folder when all was fresh. Where both are
the same, all is as it was; where they differ, only items of the files that differ are judged.
"""

from __future__ import annotations

import marshal
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import latentmake
from latentmake import digest
from latentmake.data.item import Item
from latentmake.files.paths import is_remote
from latentmake.index.listing import Folder
from latentmake.index.memo import Listing, TargetStat
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.lock import place_of
from latentmake.plan.state import PartState, State
from latentmake.plan.target import PROMPTS, prompt_items

_MOST_CHANGED = 0.1  # share of the items above which all are judged
_ALWAYS = 64  # items that are few, however few there are
_LAST = "\U0010ffff"  # sorts behind whatever follows the beginning of a name


def judge_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> State:
    """Return the state of some parts; of what is remembered, only what changed is judged."""
    past = Remembered(facts, dataset, model, parts)
    usual = not facts.skipped(dataset) and dataset not in facts.unreadable
    if usual:
        if same := past.state():
            return same
        facts.note_unused(dataset)
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
    return facts.judge(PROMPTS, model, ["text"]).judge({"text": prompt_items(texts)}, owned, found)


class Remembered:
    """The listings of a dataset and its cache folder, and the last state in which all was fresh.

    Two rows of the memo hold that state; both have the same stamp. The head tells that nothing
    changed: digest of all that the state depends on besides the listings, fingerprints of these,
    digest of the images' paths, and of each part the number of targets and the digest of their
    keys. The rest has both listings, each item's place (`lock.place_of`) and the lines of each part
    (`PartState.lines`), and is read only where something changed.
    """

    def __init__(self, facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> None:
        self.folder = Folder(f"cache/{dataset}/{model}")
        self._facts, self._asked, self._parts = facts, (dataset, model), parts
        self._settings, self._layout = facts.config.datasets[dataset], facts.layout(model)
        self._scan = facts.scan(dataset)
        self._rows, name = facts.memo.snapshots, "\n".join((dataset, model, *parts))
        self._head_name, self._rest_name = f"{name}\n\nstate", f"{name}\n\nlists"
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
        data = self._rows.get(self._head_name)
        found = data and marshal.loads(data)  # noqa: S302 -- written by `keep`
        self._head = found if found and found["base"] == self._base else None

    @cached_property
    def _rest(self) -> Any:
        """The second row; None where another plan has replaced the state since."""
        data = self._rows.get(self._rest_name)
        found = data and marshal.loads(data)  # noqa: S302 -- written by `keep`
        is_current = found and self._head and found["stamp"] == self._head["stamp"]
        return found if is_current else None

    def state(self) -> State | None:
        """Return the state, where nothing changed."""
        if self._head is None or self._head["listings"] != self._listings:
            return None
        states = {
            part: PartState(fresh, lines=partial(self.lines, part), remembered=keys)
            for part, (fresh, keys) in self._head["parts"].items()
        }
        return State(states, self._head["images"])

    def lines(self, part: str) -> dict[str, str]:
        """Return stem -> lines of its fresh targets; none where a later state replaced them."""
        if self._rest is None:
            return {}
        lines = zip(self._rest["places"], self._rest["lines"][part], strict=True)
        return {stem: line for stem, line in lines if line}

    def keep(self, state: State, places: Mapping[str, str]) -> None:
        """Remember a state in which all is fresh; `places` are those of all items, by stem."""
        if state.unreadable or any(each.stale or each.orphans for each in state.parts.values()):
            return
        lines = {part: state.parts[part].lines() for part in self._parts}
        head: dict[str, object] = {
            "stamp": os.urandom(16),
            "base": self._base,
            "listings": self._listings,
            "images": state.images,
            "parts": {part: (state.parts[part].fresh, state.parts[part].keys) for part in lines},
        }
        rest = {
            "stamp": head["stamp"],
            "entries": self._scan.entries,
            "folders": self.folder.folders,
            "places": dict(places),
            "lines": {part: [x.get(stem, "") for stem in places] for part, x in lines.items()},
        }
        # Version 2 of the format looks for no objects that are shared: it is the fastest.
        self._rows.learn(self._rest_name, None, marshal.dumps(rest, 2))
        self._rows.learn(self._head_name, None, marshal.dumps(head, 2))

    def judged(
        self,
        items: Sequence[Item],
        owned: Collection[str],
        found: Listing,
        gone: Collection[str] | None = None,
    ) -> State:
        """Return the state of some items.

        Args:
            items: the items.
            owned: stems of all items.
            found: the files in the cache folder that may be theirs.
            gone: those that are no longer there; None where all items are judged.
        """
        facts, (_, model) = self._facts, self._asked
        latents = facts.inputs(model, "latents", items)  # the same at each resolution
        inputs = {
            part: latents if parsed(part).kind == "latents" else facts.inputs(model, part, items)
            for part in self._parts
        }
        some = None if gone is None else (items, [*found, *gone])
        judge = facts.judge(*self._asked, self._parts, some)
        if not any(parsed(part).kind == "text" for part in self._parts):  # the trainer encodes it
            for each in facts.inputs(model, "text", items):
                judge.contents.of(each)
        return judge.judge(inputs, owned, found)

    # -- what changed -------------------------------------------------------------------------

    def changed(self) -> tuple[State, Mapping[str, str]] | None:
        """Return the state of all items, of which those of changed files are judged, and places.

        None where all items must be judged.
        """
        if (touched := self._touched()) is None:
            return None
        stems, caches, bases, most = touched
        before: dict[str, str] = self._rest["places"]
        entries = [*_of_stems(sorted(self._scan.entries), stems, itemgetter(0))]
        items = self._facts.items_among(*self._asked, entries)
        if items is None:
            return None
        now = {item.stem: item for item in items}
        gone, new = {*_of_stems(sorted(before), stems)} - now.keys(), now.keys() - before.keys()
        affected = {self._layout.base(stem) for stem in (*now, *gone)}
        others = {stem for base in affected for stem in bases.get(base, ())} - now.keys() - gone
        odd = self._layout.external or any(size < 0 for _, size, *_ in self._scan.entries)
        if others or ((gone or new) and odd) or len(now) + len(gone) > most:
            return None
        places = {stem: place for stem, place in before.items() if stem not in gone}
        places |= {stem: place_of(item, self._layout) for stem, item in now.items()}
        if not places:
            return None
        if new:
            places = dict(sorted(places.items()))
        found = self._listing(affected, caches)
        state = self.judged(items, {*places}, found, [each for each in caches if each not in found])
        if state.unreadable:
            return None
        lines: dict[str, dict[str, str]] = {}
        for part in self._parts:  # what is remembered of the other items comes to it
            each = state.parts[part]
            judged, known = each.lines(), self.lines(part)
            both = ((stem, (judged if stem in now else known).get(stem)) for stem in places)
            lines[part] = {stem: line for stem, line in both if line}
            each.lines = partial(lines.__getitem__, part)
            each.fresh = sum(line.count("\n") + 1 for line in lines[part].values())
        state.images = digest.of_lines(places.values())
        return state, places

    def _touched(self) -> tuple[set[str], set[str], dict[str, list[str]], float] | None:
        """Return the stems that changed files may belong to, and the changed cache files.

        Also base (`Layout.base`) -> stems of the items before, and how many items may change. None
        where all must be judged: an item may depend on files that do not bear its stem, or too many
        files changed.
        """
        settings, scan = self._settings, self._scan
        if (
            self._head is None
            or scan.items is not None
            or is_remote(scan.root)
            or settings.control_directory is not None
            or settings.metadata_file is not None
            or settings.multiple_target
            or self.folder.has_links
            or self._rest is None
        ):
            return None
        stems, bases, before = set[str](), dict[str, list[str]](), self._rest["places"]
        entries = self._rest["entries"]
        files = set() if entries == scan.entries else {*entries} ^ {*scan.entries}
        old, now = dict(self._rest["folders"]), dict(self.folder.folders)
        caches = {
            f"{folder}/{name}"
            for folder in old.keys() | now.keys()
            if old.get(folder) != now.get(folder)
            for name, *_ in {*old.get(folder, ())} ^ {*now.get(folder, ())}
        }
        most = max(_ALWAYS, _MOST_CHANGED * len(before))
        if len(files) + len(caches) > most or any(size < 0 for _, size, *_ in files):
            return None
        endings = [x.lower() for x in (settings.caption_extension, settings.tags_extension) if x]
        for path, *_ in files:
            stems.add(path.rpartition(".")[0] or path)
            stems.update(path[: -len(each)] for each in endings if path.lower().endswith(each))
        for stem in before:
            bases.setdefault(self._layout.base(stem), []).append(stem)
        for path in caches:
            for base in self._layout.owners("/".join(path.split("/")[4:])):
                stems.update(bases.get(base, ()))
        return stems, caches, bases, most

    def _listing(self, bases: set[str], changed: Collection[str]) -> Listing:
        """Return the files in the cache that may belong to some bases, and those that changed."""
        found: Listing = {}
        below: dict[str, list[str]] = {}
        for base in bases:
            below.setdefault(base.rpartition("/")[0], []).append(base)
        touched = {path.rpartition("/")[0] for path in changed}
        for place, entries in self.folder.folders:
            folder = "/".join(place.split("/")[4:])  # below that of the part
            ordered, inner = sorted(entries) if folder in below else [], f"{folder}/" * bool(folder)
            for base in below.get(folder, ()):
                name = base.removeprefix(inner)
                first, last = (bisect_left(ordered, (each,)) for each in (name, f"{name}{_LAST}"))
                for file, *stat in ordered[first:last]:
                    if base in self._layout.owners(f"{inner}{file}"):
                        found[f"{place}/{file}"] = TargetStat(*stat)
            for file, *stat in entries if place in touched else ():
                if f"{place}/{file}" in changed:
                    found[f"{place}/{file}"] = TargetStat(*stat)
        return found


def _of_stems(names: Sequence[Any], stems: Iterable[str], key: Any = None) -> Iterator[Any]:
    """Yield the sorted names that are one of some stems or begin with one and a dot, each once."""
    for stem in stems:
        for first, last in ((stem, f"{stem}\0"), (f"{stem}.", f"{stem}/")):
            start = bisect_left(names, first, key=key)
            yield from names[start : bisect_left(names, last, start, key=key)]
