"""A lock has one digest of what trains; sources are held out by their contents alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import inputs_of, plain_path
from latentmake.base import atomic, digest
from latentmake.base.errors import ConfigError
from latentmake.formats import cachefile
from latentmake.plan.manifest import (
    Lock,
    ManifestOrder,
    Member,
    keys_digest,
    read_lock,
    refuse_too_many,
)
from latentmake.plan.receipts import Receipt
from latentmake.runs.rows import chosen, rows_of
from latentmake.runs.rows import write_manifest as _write
from order_world import silent

PARTS = ("64", "96", "text")
FOLDER = Path("runs/first")

contents = st.integers(0, 500).map(lambda number: digest.of_bytes(str(number).encode()))
sources = st.lists(contents, min_size=4, max_size=30, unique=True)


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"else": 1}'])
def test_a_damaged_lock_is_an_empty_one(text: str) -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "dataset.lock").write_text(text)
    assert read_lock("first") == read_lock("missing") == Lock()


def test_two_lists_of_keys_share_a_digest_only_if_equal() -> None:
    lists = [
        [], [("", "")], [("a", "")], [("", "a")], [("a", "b")], [("ab", "")], [("a", "bc")],
        [("ab", "c")], [("a", "b"), ("c", "d")], [("c", "d"), ("a", "b")], [("a", "b")] * 2,
        [("a", "bcd")], [("a", "b\nc")], [("a", "b\0c")], [("a\0b", "c")], [("a\nb", "c")],
    ]  # fmt: skip
    assert len({*map(keys_digest, lists)}) == len(lists)
    assert keys_digest(iter(lists[8])) == keys_digest(lists[8])


@settings(max_examples=50)
@given(sources, contents, st.data())
def test_a_choice_depends_on_contents_and_each_that_comes_or_goes_moves_at_most_one(
    found: list[str], new: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(found) // 2))
    before, after = chosen(found, count), chosen([*found, new], count)
    assert len(before) == count and before <= {*found}
    assert chosen([*data.draw(st.permutations(found)), *found], count) == before
    assert after - before <= {new} and len(after) == count
    gone = data.draw(st.sampled_from(found))
    left = chosen([each for each in found if each != gone], count)
    assert len(left - before) == (gone in before) and before - left <= {gone}


def test_the_choice_is_this_one_for_ever() -> None:
    found = [digest.of_bytes(str(number).encode()) for number in range(100)]
    assert sorted(found.index(each) for each in chosen(found, 4)) == [10, 19, 69, 72]


@pytest.mark.parametrize(
    ("there", "words"), [(3, "set it to 1 or less"), (1, "leave out `validation`")]
)
def test_more_than_half_is_refused_in_one_line(there: int, words: str) -> None:
    with pytest.raises(ConfigError, match=r"runs\.first\.validation\.items") as raised:
        refuse_too_many("first", 2, [str(number) for number in range(there)])
    assert words in str(raised.value) and "\n" not in str(raised.value)
    refuse_too_many("first", 2, "abcd")
    refuse_too_many("first", 2, "")  # a run without items has another fault


def make(
    files: Mapping[str, str], validation: int, *, is_reg: Sequence[str] = (), **receipt: str
) -> tuple[Lock, dict[str, bool]]:
    """Write the manifest of items, each a file of some content; return the lock, and the sides.

    A name `dataset/file#clip` is a further item of that file.
    """
    items = []
    for name, content in files.items():
        dataset, stem = name.split("/")
        targets: dict[str, list[tuple[str, str | None]]] = {}
        for part in PARTS:
            path = plain_path(dataset, "tiny", part, stem)
            source = content if part != "text" else "caption"
            key = cachefile.target_key(source, "r", part)
            stamp = cachefile.stamp(key=key, source=source, recipe={})
            atomic.write(Path(path), cachefile.serialize({}, stamp))
            targets[part] = [(path, None)]
        source = f"data/{dataset}/{stem.partition('#')[0]}.png"
        atomic.write(Path(source), content.encode())
        items.append(Member(dataset, inputs_of(stem, source), targets))
    order = ManifestOrder(
        run="first", model="tiny", repeats={item.dataset: 1 for item in items}, skip=[],
        items=items, faults={}, orphans=[], planned=5, validation=validation, is_reg=[*is_reg],
    )  # fmt: skip
    paths = []
    if receipt:
        read = {path: [1, 2, 3, 4, content, 64, 64, True] for path, content in receipt.items()}
        Receipt(read, {}, [], {}, 1.0).write(Path("receipt.json"))
        paths.append(Path("receipt.json"))
    lock = _write(order, paths, FOLDER, silent)
    lines = (FOLDER / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row.get("validation", True) is True for row in rows)  # never false
    return lock, {f"{row['dataset']}/{row['stem']}": "validation" in row for row in rows}


names = st.from_regex(r"(cats|dogs)/[a-c]{1,3}(#[12])?", fullmatch=True)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(names, st.just(""), min_size=4, max_size=12), st.data())
def test_a_source_and_its_equals_are_on_one_side(
    found: dict[str, str], data: st.DataObject
) -> None:
    files = {name.partition("#")[0]: data.draw(st.sampled_from("pqrstu")) for name in found}
    items = {name: files[name.partition("#")[0]] for name in found}
    there = sorted(set(items.values()))
    if len(there) < 2:
        return
    count = data.draw(st.integers(1, len(there) // 2))
    lock, sides = make(items, count)
    held = {items[name] for name, away in sides.items() if away}
    assert not held & {items[name] for name, away in sides.items() if not away}
    assert lock.held_out == sorted(held) == sorted(chosen(there, count))
    renamed = {f"dogs/{number:03d}": items[name] for number, name in enumerate(reversed(items))}
    others = make(renamed, count)[1]
    assert {renamed[name] for name, away in others.items() if away} == held


def test_what_trains_has_a_digest_of_its_own() -> None:
    files = {f"cats/{name}": name for name in "abcdef"}
    lock, sides = make(files, 2)
    training = {name: files[name] for name, away in sides.items() if not away}
    assert len(training) == 4
    alone, _ = make(training, 0)
    assert lock.data == lock.trained == alone.digest == alone.data
    assert alone.held_out == [] and alone.trained == ""
    assert lock.digest not in (lock.trained, make(files, 0)[0].digest, make(files, 1)[0].digest)


def test_what_jobs_read_is_believed_before_headers() -> None:
    files = {f"cats/{name}": name for name in "abcd"}
    held = make(files, 1)[0].held_out
    other = make(files, 1, **{f"data/cats/{held[0]}.png": "e" * 64})[0].held_out
    assert other == sorted(chosen([*(set("abcd") - {*held}), "e" * 64], 1))


def test_regularisation_images_are_not_held_out_and_those_equal_to_held_ones_not_shown() -> None:
    files = {f"cats/{name}": name for name in "abcdef"}
    held = make(files, 2)[0].held_out
    copies = {f"man/{name}": name for name in "abcdefgh"}
    lock, sides = make(files | copies, 2, is_reg=["man"])
    assert lock.held_out == held
    assert {name for name, away in sides.items() if away} == {f"cats/{name}" for name in held}
    shown = {row.stem: row.repeats for row in rows_of(FOLDER / "manifest.jsonl") if row.is_reg}
    assert sum(shown.values()) == 4  # as many as the others that train
    assert set(shown) == set("abcdefgh") - {*held} - {"g", "h"}
    with pytest.raises(ConfigError, match="4 of 6 different sources"):
        make(files | copies, 4, is_reg=["man"])
