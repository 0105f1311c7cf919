"""Differences between the items of two trainings, and the words of an edited caption."""

from __future__ import annotations

import time
from typing import Any

import pytest
from latentmake.plan.product import Difference
from latentmake.runs.differences import (
    Change,
    compare,
    counts,
    figures,
    rows,
    settings,
    summary,
    words,
)
from latentmake.runs.history import RosterItem
from latentmake.runs.order import Record


def item(stem: str, source: str | None = None, text: str = "a cat", **values: Any) -> RosterItem:
    source = stem if source is None else source
    return RosterItem(
        **{"dataset": "cats", "stem": stem, "source": source, "texts": [text]} | values
    )


def test_items_are_added_removed_and_replaced() -> None:
    changes = compare([item("a"), item("b"), item("c")], [item("a"), item("b", "new"), item("d")])
    assert changes == [
        Change("replaced", "cats/b"),
        Change("added", "cats/d"),
        Change("removed", "cats/c"),
    ]
    assert summary(changes) == "1 added, 1 removed, 1 replaced"
    assert counts(changes) == {"added": 1, "removed": 1, "renamed": 0, "edited": 1}


def test_equal_rosters_have_no_changes() -> None:
    changes = compare([item("a")], [item("a")])
    assert changes == [] and summary(changes) == ""


def test_a_picture_under_another_name_is_renamed_and_its_caption_is_compared() -> None:
    old = [item("a", "picture", "a red cat"), item("b", "other")]
    changes = compare(old, [item("z", "picture", "a cat", dataset="dogs"), item("b", "other")])
    assert changes == [
        Change("renamed", "dogs/z", "cats/a"),
        Change("caption", "dogs/z", "a red cat", "a cat"),
    ]
    assert [*rows(changes, 9)] == [Change("renamed", "cats/a -> dogs/z"), changes[1]]


def test_of_equal_pictures_each_old_name_has_one_new_name() -> None:
    old = [item("a", "same"), item("b", "same")]
    changes = compare(old, [item(stem, "same") for stem in "xyz"])
    assert changes == [
        Change("renamed", "cats/x", "cats/a"),
        Change("renamed", "cats/y", "cats/b"),
        Change("added", "cats/z"),
    ]


def test_unknown_pictures_are_neither_renamed_nor_replaced() -> None:
    changes = compare([item("a", ""), item("b", "")], [item("b", "known"), item("c", "")])
    assert changes == [Change("added", "cats/c"), Change("removed", "cats/a")]


def test_repeats_are_counted_by_their_values() -> None:
    old = [item("a"), item("b"), item("c", repeats=3)]
    changes = compare(old, [item("a", repeats=2), item("b", repeats=2), item("c", validation=True)])
    assert [change.item for change in rows(changes, 9)] == [
        "repeats 1 -> 2: 2 of cats",
        "repeats 3 -> 1: 1 of cats",
        "held out false -> true: 1 of cats",
    ]
    assert summary(changes) == "3 with other repeats or sizes"


def test_variants_of_a_caption_are_compared_one_by_one() -> None:
    old = item("a", texts=["a cat", "one cat"])
    changes = compare([old], [item("a", texts=["a cat", "my cat", "cat"])])
    assert changes == [
        Change("caption", "cats/a", "one cat", "my cat"),
        Change("caption", "cats/a", "", "cat"),
    ]
    assert summary(changes) == "1 with another caption"


def test_of_many_changes_the_first_are_shown() -> None:
    changes = compare([], [item(stem) for stem in "abc"])
    assert [change.item for change in rows(changes, 1)] == [
        "cats/a",
        "and 2 more; --json lists all",
    ]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a red cat", "a blue cat", "a [red]{blue} cat"),
        ("a cat", "a big cat", "a {big }cat"),
        ("a cat", "", "[a cat]"),
        ("cat, red", "cat, red, hat", "cat, red{, hat}"),
        ("a red fat cat", "a blue slim cat", "a [red fat]{blue slim} cat"),
        ("cat\nhat", "cat hat", "cat[\n]{ }hat"),
        ("a half-open door's end", "a half-shut door's end", "a [half-open]{half-shut} door's end"),
    ],
)
def test_an_edited_caption_is_shown_by_words(before: str, after: str, expected: str) -> None:
    forms = {"": "{}", "-": "[{}]", "+": "{{{}}}"}
    parts = words(before, after)
    assert "".join(forms[mark].format(text) for mark, text in parts) == expected
    assert "".join(text for mark, text in parts if mark != "+") == before
    assert "".join(text for mark, text in parts if mark != "-") == after


def record(rank: str, caches: str = "k", **values: Any) -> Record:
    data = {"caches of cats/text": caches}
    parts = {"dataset": caches, "settings": f"digest of {rank}"}
    named = {"dataset": data, "settings": {"rank": rank, "steps": "9"}}
    return Record(parts=parts, values=named, **{"seconds": 2.0, **values})


def test_settings_are_named_and_caches_only_if_no_item_explains_them() -> None:
    old, new = record("4", "k"), record("8", "l")
    rank = Difference("rank", "4", "8")
    assert settings(old, new, compare([item("a")], [item("b")])) == [rank]
    same = compare([item("a")], [item("a")])
    assert settings(old, new, same) == [Difference("caches of cats/text", "k", "l"), rank]
    assert settings(old, old, same) == []


def test_figures_are_those_that_a_training_has() -> None:
    old, new = record("4", loss_end=0.5), record("4", loss_end=0.25, held_out=0.75)
    assert [*figures(old, new)] == [
        ("loss at the end", 0.5, 0.25),
        ("held-out loss", None, 0.75),
        ("seconds", 2.0, 2.0),
    ]


def test_many_items_of_one_picture_are_compared_in_linear_time() -> None:
    old = [item(f"a{number}", "same") for number in range(20_000)]
    new = [item(f"b{number}", "same") for number in range(20_000)]
    begin = time.process_time()
    assert len(compare(old, new)) == 20_000
    assert time.process_time() - begin < 5
