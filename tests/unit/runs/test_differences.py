"""Differences between the items of two trainings, and the words of an edited caption."""

from __future__ import annotations

import time
from typing import Any

import pytest
from latentmake.plan.product import Difference
from latentmake.runs.differences import compare, figures, settings, words
from latentmake.runs.history import RosterItem
from latentmake.runs.order import Record


def item(stem: str, source: str | None = None, text: str = "a cat", **values: Any) -> RosterItem:
    source = stem if source is None else source
    return RosterItem(
        **{"dataset": "cats", "stem": stem, "source": source, "texts": [text]} | values
    )


def test_items_are_added_removed_and_replaced() -> None:
    changes = compare([item("a"), item("b"), item("c")], [item("a"), item("b", "new"), item("d")])
    assert changes.added == [("cats", "d")]
    assert changes.removed == [("cats", "c")]
    assert changes.replaced == [("cats", "b")]
    assert changes.summary == "1 added, 1 removed, 1 replaced"
    assert changes.datasets == {"cats"}


def test_equal_rosters_have_no_changes() -> None:
    changes = compare([item("a")], [item("a")])
    assert changes.summary == "" and changes.datasets == set()


def test_a_picture_under_another_name_is_renamed_and_its_caption_is_compared() -> None:
    old = [item("a", "picture", "a red cat"), item("b", "other")]
    changes = compare(old, [item("z", "picture", "a cat", dataset="dogs"), item("b", "other")])
    assert changes.renamed == [(("cats", "a"), ("dogs", "z"))]
    assert changes.added == changes.removed == changes.replaced == []
    assert changes.captions == [(("dogs", "z"), ["a red cat"], ["a cat"])]


def test_of_equal_pictures_each_old_name_has_one_new_name() -> None:
    old = [item("a", "same"), item("b", "same")]
    changes = compare(old, [item(stem, "same") for stem in "xyz"])
    assert changes.renamed == [(("cats", "a"), ("cats", "x")), (("cats", "b"), ("cats", "y"))]
    assert changes.added == [("cats", "z")] and not changes.removed


def test_unknown_pictures_are_neither_renamed_nor_replaced() -> None:
    changes = compare([item("a", ""), item("b", "")], [item("b", "known"), item("c", "")])
    assert (changes.added, changes.removed) == ([("cats", "c")], [("cats", "a")])
    assert not changes.replaced and not changes.renamed


def test_repeats_are_counted_by_their_values() -> None:
    old = [item("a"), item("b"), item("c", repeats=3)]
    changes = compare(old, [item("a", repeats=2), item("b", repeats=2), item("c", validation=True)])
    assert changes.others == {
        ("cats", Difference("repeats", "1", "2")): 2,
        ("cats", Difference("repeats", "3", "1")): 1,
        ("cats", Difference("held out", "false", "true")): 1,
    }


def test_variants_of_a_caption_are_compared_one_by_one() -> None:
    old = item("a", texts=["a cat", "one cat"])
    changes = compare([old], [item("a", texts=["a cat", "my cat", "cat"])])
    place = ("cats", "a")
    assert [*changes.edits()] == [(place, "one cat", "my cat"), (place, "", "cat")]


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
    assert len(compare(old, new).renamed) == 20_000
    assert time.process_time() - begin < 5
