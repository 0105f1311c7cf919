"""Differences between two trainings: items, captions word by word, settings and figures.

The functions only compare values. Each of them takes a time that is linear in the number of items.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from latentmake.plan.product import Difference, judge, text_of
from latentmake.runs.history import RosterItem
from latentmake.runs.order import Record

_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|\s+|.", re.DOTALL)
_COMPARED = ("repeats", "resolutions", "view", "validation", "is_reg")
MEMORY = "peak memory"
"""Name of a figure, which is a number of bytes."""
_CACHES = re.compile(r"caches of (.+)/[^/]*")

Place = tuple[str, str]
"""Dataset and stem of an item."""
Marked = tuple[str, str]
"""Part of a caption: a mark (`-` was removed, `+` was added, else "") and its text."""


class Changes(NamedTuple):
    """Changes from the items of one training to those of another.

    Attributes:
        added: items that only the later training saw.
        removed: items that only the earlier training saw.
        replaced: items with another picture.
        renamed: old and new place of each picture with another name.
        captions: place of each item whose texts differ, with its old and its new texts.
        others: dataset and difference, such as `repeats 1 -> 2` -> number of its items.
    """

    added: list[Place]
    removed: list[Place]
    replaced: list[Place]
    renamed: list[tuple[Place, Place]]
    captions: list[tuple[Place, list[str], list[str]]]
    others: Counter[tuple[str, Difference]]

    @property
    def datasets(self) -> set[str]:
        """Datasets with changes."""
        moved = (place for pair in self.renamed for place in pair)
        edited = (place for place, _, _ in self.captions)
        places = (*self.added, *self.removed, *self.replaced, *moved, *edited)
        return {dataset for dataset, _ in (*places, *self.others)}

    @property
    def summary(self) -> str:
        """Kinds of changes with their numbers of items; "" if nothing differs."""
        counts = {
            "added": len(self.added),
            "removed": len(self.removed),
            "replaced": len(self.replaced),
            "renamed": len(self.renamed),
            "with another caption": len(self.captions),
            "with other repeats or sizes": max(self.others.values(), default=0),
        }
        return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)

    def edits(self) -> Iterator[tuple[Place, str, str]]:
        """Yield place, old and new text of each edited text."""
        for place, old, new in self.captions:
            for before, after in zip_longest(old, new, fillvalue=""):
                if before != after:
                    yield place, before, after


def compare(old: Iterable[RosterItem], new: Iterable[RosterItem]) -> Changes:
    """Return the changes between the items of two trainings.

    Items are equal if dataset and stem are. An added item with the picture of a removed one counts
    as renamed. Unknown pictures are not compared.
    """
    before, after = ({(item.dataset, item.stem): item for item in items} for items in (old, new))
    gone: dict[str, deque[Place]] = {}
    for place, item in before.items():
        if place not in after:
            gone.setdefault(item.source, deque()).append(place)
    unknown = gone.pop("", deque())
    changes = Changes([], [], [], [], [], Counter())
    for place, now in after.items():
        former = place
        if place not in before:
            if not (places := gone.get(now.source)):
                changes.added.append(place)
                continue
            former = places.popleft()
            changes.renamed.append((former, place))
        if (was := before[former]) == now:
            continue
        if "" not in (was.source, now.source) and was.source != now.source:
            changes.replaced.append(place)
        if was.texts != now.texts:
            changes.captions.append((place, was.texts, now.texts))
        for name in _COMPARED:
            if (past := getattr(was, name)) != (present := getattr(now, name)):
                changes.others[now.dataset, _difference(name, past, present)] += 1
    left = {*unknown, *(place for places in gone.values() for place in places)}
    changes.removed.extend(place for place in before if place in left)
    return changes


def _difference(name: str, old: object, new: object) -> Difference:
    names = {"view": "crop and scale", "validation": "held out", "is_reg": "regularisation"}
    return Difference(names.get(name, name), text_of(old) or "default", text_of(new) or "default")


def words(before: str, after: str) -> list[Marked]:
    """Return the parts of an edited caption: kept, removed and added words."""
    old, new = _TOKEN.findall(before), _TOKEN.findall(after)
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    parts: list[Marked] = []
    removed, added = "", ""
    for number, (kind, start, end, new_start, new_end) in enumerate(blocks):
        was, now = "".join(old[start:end]), "".join(new[new_start:new_end])
        # Two edits with only a space between them are one edit.
        joins = not was.strip() and removed + added and number < len(blocks) - 1
        if kind == "equal" and not joins:
            parts += [("-", removed), ("+", added), ("", was)]
            removed = added = ""
        else:
            removed, added = removed + was, added + now
    parts += [("-", removed), ("+", added)]
    return [(mark, text) for mark, text in parts if text]


def settings(old: Record, new: Record, changes: Changes | None) -> list[Difference]:
    """Return differences of the settings and the networks of two trainings.

    Caches are named if no change of the dataset's items explains why they differ.
    """
    explained = changes.datasets if changes else set()
    return [
        difference
        for difference in judge(new.product, old)
        if not ((match := _CACHES.fullmatch(difference.name)) and match[1] in explained)
    ]


def figures(old: Record, new: Record) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield name, old and new value of each figure that at least one training has."""
    for name, was, now in (
        ("loss at the start", old.loss_start, new.loss_start),
        ("loss at the end", old.loss_end, new.loss_end),
        ("held-out loss", old.held_out, new.held_out),
        ("steps", old.steps, new.steps),
        ("seconds", old.seconds or None, new.seconds or None),
        (MEMORY, old.memory or None, new.memory or None),
    ):
        if (was, now) != (None, None):
            yield name, was, now
