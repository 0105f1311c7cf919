"""Differences between two trainings: items, captions word by word, settings and figures.

The functions only compare values. Each of them takes a time that is linear in the number of items.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from latentmake.plan.product import Difference, judge, text_of
from latentmake.runs.history import RosterItem
from latentmake.runs.order import Record

_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|\s+|.", re.DOTALL)
_LISTED = ("added", "removed", "replaced", "renamed", "caption")
_OTHERS = {
    **{"repeats": "repeats", "resolutions": "resolutions", "view": "crop and scale"},
    **{"validation": "held out", "is_reg": "regularisation"},
}
"""Value of an item in a roster -> kind of its change."""
MEMORY = "peak memory"
"""Name of a figure, which is a number of bytes."""
_CACHES = re.compile(r"caches of (.+)/[^/]*")

Marked = tuple[str, str]
"""Part of a caption: a mark (`-` was removed, `+` was added, else "") and its text."""


class Change(NamedTuple):
    """A change of an item from one training to another.

    Attributes:
        kind: `added`, `removed`, `replaced` (it has another picture), `renamed` (its picture had
            another name), `caption`, or the name of another value, such as `repeats`.
        item: name of the item, such as `cats/a`.
        old: former name of a renamed item, former text of a caption, or former value.
        new: new text of a caption, or new value.
    """

    kind: str
    item: str
    old: str = ""
    new: str = ""


def compare(old: Iterable[RosterItem], new: Iterable[RosterItem]) -> list[Change]:
    """Return the changes between the items of two trainings.

    Items are equal if dataset and stem are. An added item with the picture of a removed one counts
    as renamed. Unknown pictures are not compared.
    """
    before, after = ({item.name: item for item in items} for items in (old, new))
    gone: dict[str, deque[str]] = {}
    for name, item in before.items():
        if name not in after:
            gone.setdefault(item.source, deque()).append(name)
    unknown = gone.pop("", deque())
    changes = list[Change]()
    for name, now in after.items():
        former = name
        if name not in before:
            if not (names := gone.get(now.source)):
                changes.append(Change("added", name))
                continue
            former = names.popleft()
            changes.append(Change("renamed", name, former))
        changes += _of_item(before[former], now)
    left = {*unknown, *(name for names in gone.values() for name in names)}
    return changes + [Change("removed", name) for name in before if name in left]


def _of_item(was: RosterItem, now: RosterItem) -> Iterator[Change]:
    """Yield the changes of picture, captions and other values of an item."""
    if was == now:
        return
    if "" not in (was.source, now.source) and was.source != now.source:
        yield Change("replaced", now.name)
    for before, after in zip_longest(was.texts, now.texts, fillvalue=""):
        if before != after:
            yield Change("caption", now.name, before, after)
    for key, kind in _OTHERS.items():
        if (past := getattr(was, key)) != (present := getattr(now, key)):
            old, new = text_of(past) or "default", text_of(present) or "default"
            yield Change(kind, now.name, old, new)


def counts(changes: Iterable[Change]) -> dict[str, int]:
    """Return the numbers of items that were added, removed, renamed and edited."""
    same = {kind: kind for kind in ("added", "removed", "renamed")}
    return _numbers(changes, same | {"replaced": "edited", "caption": "edited"})


def summary(changes: Iterable[Change]) -> str:
    """Return the numbers of items with each kind of change; "" if nothing differs."""
    others = dict.fromkeys(_OTHERS.values(), "with other repeats or sizes")
    same = {kind: kind for kind in _LISTED}
    return in_words(_numbers(changes, same | {"caption": "with another caption"} | others))


def _numbers(changes: Iterable[Change], words: Mapping[str, str]) -> dict[str, int]:
    """Return word -> number of items with changes of its kinds; `words` has the word of a kind."""
    items = {(words[kind], item) for kind, item, *_ in changes if kind in words}
    numbers = Counter(word for word, _ in items)
    return {word: numbers[word] for word in words.values()}


def in_words(numbers: Mapping[str, int]) -> str:
    """Return numbers with their words, `3 added, 1 removed`, without those that are 0."""
    return ", ".join(f"{number} {word}" for word, number in numbers.items() if number)


def rows(changes: Sequence[Change], most: int) -> Iterator[Change]:
    """Yield at most so many changes of each kind as people read them.

    Renamed items have both names; values such as `repeats` are counted by dataset.
    """
    for kind in _LISTED:
        several = [change for change in changes if change.kind == kind]
        for change in several[:most]:
            renamed = Change(kind, f"{change.old} -> {change.item}")
            yield renamed if kind == "renamed" else change
        if len(several) > most:
            yield Change(kind, f"and {len(several) - most} more; --json lists all")
    others = Counter(
        (f"{kind} {old} -> {new}", _dataset(item))
        for kind, item, old, new in changes
        if kind not in _LISTED
    )
    for (text, dataset), number in others.items():
        yield Change("items", f"{text}: {number} of {dataset}")


def _dataset(item: str) -> str:
    return item.partition("/")[0]


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


def settings(old: Record, new: Record, changes: Iterable[Change] | None) -> list[Difference]:
    """Return differences of the settings and the networks of two trainings.

    Caches are named if no change of the dataset's items explains why they differ.
    """
    explained = set[str]()
    for kind, item, former, _ in changes or ():
        explained |= {_dataset(item), _dataset(former) if kind == "renamed" else ""}
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
