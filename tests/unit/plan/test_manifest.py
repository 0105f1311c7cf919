"""A manifest names what a run trains on; its lock has one digest of it, the planner's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import NO_STAT, inputs_of, plain_path
from latentmake.base import atomic
from latentmake.base.errors import CacheError, DatasetError, TrainingError
from latentmake.data.item import CAPTION, CONTROL, IMAGE, LAYER, File, Item
from latentmake.formats import cachefile
from latentmake.geometry.clips import Span
from latentmake.plan.manifest import (
    Lock,
    ManifestOrder,
    Member,
    keys_digest,
    lock_digest,
    read_lock,
)
from latentmake.plan.receipts import Receipt
from latentmake.runs.rows import Row, balanced, rows_of, write_manifest
from order_world import silent
from safetensors.torch import save_file

PARTS = ("64", "text")
GROUPS = [
    ("rain/a", "data/films/rain/a.mp4", "rain"),
    ("rain/light/a", "data/films/rain/light/a.png", "rain"),
    ("rain_a", "data/films/rain/a.mp4", "rain"),  # one of several of its name
    ("rain_light_a.f0-5", "data/films/rain/light/a.mp4", "rain"),  # of a list
    ("films_rain_a", "./films/rain/a.mp4", "films"),
    ("mnt_rain_a.s1-2", "/mnt/rain/a.mp4", "rain"),  # outside of the list's folder
    ("rain_a", "data/films/rain_a.mp4", ""),
    ("a", "data/films/a.mp4", ""),
    ("a", "data/films/rain/a.mp4", ""),  # of a flat list
    ("rain/a", "s3://films/rain/a.png", "rain"),
]
FOLDER = Path("runs/first")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(stem: str, part: str, key: str, dataset: str = "cats") -> str:
    """Write a cache file of some key and return its path."""
    path = plain_path(dataset, "tiny", part, stem)
    stamp = cachefile.stamp(key=key, source="s", recipe={})
    atomic.write(Path(path), cachefile.serialize({"x": torch.ones(1)}, stamp))
    return path


def item(stem: str, dataset: str = "cats", **keys: str | None) -> Member:
    known = {part: keys.get(f"key_{part}", f"{part} of {stem}") for part in PARTS}
    targets = {
        part: [(plain_path(dataset, "tiny", part, stem), key)] for part, key in known.items()
    }
    return Member(dataset, inputs_of(stem, f"data/{stem}.png"), targets)


def order(*items: Member, **changes: Any) -> ManifestOrder:
    values: dict[str, Any] = {
        "run": "first",
        "model": "tiny",
        "repeats": {"cats": 1},
        "skip": [],
        "items": list(items),
        "faults": {},
        "orphans": [],
        "planned": 5,
    }
    return ManifestOrder(**{**values, **changes})


def write(work: ManifestOrder, *receipts: Receipt, say: Any = silent) -> Lock:
    places = []
    for number, receipt in enumerate(receipts):
        places.append(Path(f"receipt{number}.json"))
        receipt.write(places[-1])
    return write_manifest(work, places, FOLDER, say)


def rows() -> list[dict[str, Any]]:
    text = (FOLDER / "manifest.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


def fault(stem: str, dataset: str = "cats") -> dict[str, str]:
    line = f"data/{stem}.png: is damaged; replace it"
    return {
        "dataset": dataset,
        "stem": stem,
        "path": f"data/{stem}.png",
        "digest": "d",
        "line": line,
    }


def receipt(targets: dict[str, str] | None = None, *faults: dict[str, str]) -> Receipt:
    made = {path: [1, 2, 3, key] for path, key in (targets or {}).items()}
    return Receipt({}, made, list(faults), {}, 1.0)


# -- what is written ------------------------------------------------------------------------------


def test_each_item_is_one_line_with_the_paths_of_its_caches() -> None:
    write(order(item("a"), item("sub/é"), repeats={"cats": 3}))
    assert rows()[1] == {
        "dataset": "cats",
        "stem": "sub/é",
        "source": "data/sub/é.png",
        "repeats": 3,
        "latents": {"64": "cache/cats/tiny/64/sub/é.latents.safetensors"},
        "text": "cache/cats/tiny/text/sub/é.text.safetensors",
    }
    assert [row["stem"] for row in rows()] == ["a", "sub/é"]


def test_a_line_stays_one_line_to_every_reader() -> None:
    stem = "a\u2028b\u0085c\u2029d"
    write(order(item(stem)))
    text = (FOLDER / "manifest.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["stem"] for line in text.splitlines()] == [stem]


def test_the_lock_on_disk_is_what_is_returned() -> None:
    lock = write(order(item("a")), receipt())
    assert read_lock("first") == lock
    assert lock.counts == {"cats/64": 1, "cats/text": 1}


# -- the digest -----------------------------------------------------------------------------------

stems = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.dictionaries(stems, st.text("0123456789abcdef", min_size=4, max_size=4), min_size=1))
def test_the_planners_digest_is_the_jobs(keys: dict[str, str]) -> None:
    names = sorted(keys)
    items = [item(stem, key_64=keys[stem], key_text=keys[stem][::-1]) for stem in names]
    lock = write(order(*items, repeats={"cats": 2}))
    parts = {
        "cats/64": keys_digest((stem, keys[stem]) for stem in names),
        "cats/text": keys_digest((stem, keys[stem][::-1]) for stem in names),
    }
    assert lock.parts == parts
    assert lock.digest == lock_digest(parts, {"cats": 2})
    assert lock.digest == lock_digest(dict(reversed(parts.items())), {"cats": 2})


def as_sd_scripts_counts(repeats: list[int], images: int) -> list[int]:
    """Count as `DreamBoothDataset.__init__` of its library/train_util.py does."""
    found, n, first = [0] * len(repeats), 0, True
    while n < images:
        for place, count in enumerate(repeats):
            found[place] += count if first else 1
            n += count if first else 1
            if n >= images:
                break
        first = False
    return found


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(0, 60))
def test_regularisation_images_are_balanced_as_in_sd_scripts(
    repeats: list[int], images: int
) -> None:
    assert balanced(repeats, images) == as_sd_scripts_counts(repeats, images)


def test_a_row_says_how_often_an_epoch_shows_a_regularisation_image() -> None:
    cats = [item(stem) for stem in "ab"]
    men = [item(stem, "man") for stem in ("w", "x", "y", "z")]
    names = {"man": 1, "cats": 3}
    said: list[str] = []
    lock = write(order(*men, *cats, repeats=names, is_reg=["man"]), say=said.append)
    shown = [(row["stem"], row["repeats"], row.get("is_reg", False)) for row in rows()]
    assert shown == [
        *(("w", 2, True), ("x", 2, True), ("y", 1, True), ("z", 1, True)),
        *(("a", 3, False), ("b", 3, False)),
    ]
    # The same datasets without, then with too many; sd-scripts balances its own.
    plain = write(order(*men, *cats, repeats=names))
    assert plain.digest != lock.digest and plain.parts == lock.parts
    assert "is_reg" not in (FOLDER / "dataset.lock").read_text()
    write(order(*men, cats[0], repeats={**names, "cats": 2}, is_reg=["man"]), say=said.append)
    assert [row.stem for row in rows_of(FOLDER / "manifest.jsonl")] == ["w", "x", "a"]
    assert [row["aside"].partition(":")[0] for row in rows() if "aside" in row] == ["not used"] * 2
    assert said == ["regularisation images that are not used: 2 of 4"]
    write(order(*men, *cats, repeats=names, is_reg=["man"], layout="sdscripts-sd1"))
    assert [(row["repeats"], "is_reg" in row) for row in rows()] == [(1, True)] * 4 + [
        (3, False)
    ] * 2


def test_keys_come_from_receipts_then_from_the_plan_then_from_the_files() -> None:
    made = {make("a", "64", "of another one"): "made"}
    make("a", "text", "in the file")
    lock = write(order(item("a", key_64="planned", key_text=None)), receipt(made))
    assert lock.parts["cats/64"] == keys_digest([("a", "made")])
    assert lock.parts["cats/text"] == keys_digest([("a", "in the file")])
    lock = write(order(item("a", key_64="planned", key_text=None)))
    assert lock.parts["cats/64"] == keys_digest([("a", "planned")])


def test_a_target_that_is_missing_or_damaged_is_named() -> None:
    path = Path(plain_path("cats", "tiny", "64", "a"))
    with pytest.raises(CacheError, match=f"^{path}: this cache file is gone; run again"):
        write(order(item("a", key_64=None)))
    with pytest.raises(CacheError, match=f"^{path}: this cache file is gone; run again"):
        write(order(item("a")), receipt({str(path): "made, and deleted since"}))
    make("a", "64", "k")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheError, match=f"^{path}: is cut short"):
        write(order(item("a", key_64=None)))
    assert not FOLDER.exists()


# -- faults ---------------------------------------------------------------------------------------


def test_faults_fail_with_every_line_and_write_nothing() -> None:
    orphan = make("gone", "64", "k")
    work = order(item("a"), item("b"), item("c"), faults={"cats": [fault("b")]}, orphans=[orphan])
    with pytest.raises(DatasetError) as caught:
        write(work, receipt({}, fault("c")))
    line = str(caught.value)
    assert line.startswith("run first: 2 faulty: ")
    assert "data/b.png: is damaged" in line
    assert "data/c.png: is damaged" in line
    assert line.endswith("all other items are done; set on_error: skip to train without these")
    assert not FOLDER.exists()
    assert Path(orphan).exists()


def test_skipped_items_are_listed_aside_and_not_trained_on() -> None:
    said: list[str] = []
    work = order(item("a"), item("b"), skip=["cats"], faults={"cats": [fault("c")]})
    lock = write(work, receipt({}, fault("b")), say=said.append)
    assert [row["stem"] for row in rows() if "aside" not in row] == ["a"]
    aside = [row for row in rows() if "aside" in row]
    assert sorted(row["stem"] for row in aside) == ["b", "c"]
    assert all(set(row) == {"dataset", "stem", "source", "aside"} for row in aside)
    assert "data/b.png: is damaged" in "\n".join(said)
    assert [each["stem"] for each in lock.aside["cats"]] == ["c", "b"]
    assert lock.counts == {"cats/64": 1, "cats/text": 1}
    assert lock.parts == write(order(item("a"))).parts


def test_rows_with_columns_of_a_later_release_are_read_without_skipped_items() -> None:
    write(order(item("a"), item("b"), skip=["cats"]), receipt({}, fault("b")))
    path = FOLDER / "manifest.jsonl"
    path.write_text(path.read_text().replace("{", '{"later": {"x": 1}, ', 1))
    (row,) = rows_of(path)
    assert (row.stem, row.repeats, row.validation) == ("a", 1, False)
    assert row.latents_at("64") == [plain_path("cats", "tiny", "64", "a")]
    assert row.texts_at("64") == [row.first_text] == [plain_path("cats", "tiny", "text", "a")]
    path.write_text(path.read_text() + "{}")
    with pytest.raises(TrainingError, match=r"manifest\.jsonl: line 3 of the manifest is damaged"):
        list(rows_of(path))


def test_only_the_datasets_that_say_so_are_skipped() -> None:
    work = order(item("a"), item("b", "dogs"), skip=["cats"], repeats={"cats": 1, "dogs": 1})
    with pytest.raises(DatasetError, match="1 faulty"):
        write(work, receipt({}, fault("a"), fault("b", "dogs")))


def test_a_run_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(DatasetError, match="run first: no item is left to train on"):
        write(order(item("a"), skip=["cats"]), receipt({}, fault("a")))


# -- orphans --------------------------------------------------------------------------------------


def test_orphans_of_ours_are_removed_with_the_folders_they_leave_empty() -> None:
    said: list[str] = []
    gone = make("sub/deep/gone", "64", "k")
    kept = make("a", "64", "k")
    write(order(item("a"), orphans=[gone]), say=said.append)
    assert not Path("cache/cats/tiny/64/sub").exists()
    assert Path(kept).exists()
    assert said == ["removed 1 cache files whose items are gone"]


def test_a_half_written_file_is_removed() -> None:
    left = Path("cache/cats/tiny/64") / f".x{atomic.TEMPORARY_SUFFIX}"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    write(order(item("a"), orphans=[str(left)]))
    assert not left.exists()


def test_a_file_that_is_not_ours_is_never_removed() -> None:
    said: list[str] = []
    folder = Path("cache/cats/tiny/64")
    folder.mkdir(parents=True)
    theirs = [folder / "theirs.latents.safetensors", folder / "notes.latents.safetensors"]
    save_file({"x": torch.ones(1)}, theirs[0])
    theirs[1].write_text("not even safetensors")
    orphans = [str(path) for path in theirs] + [str(folder / "gone.latents.safetensors")]
    write(order(item("a"), orphans=orphans), say=said.append)
    assert all(path.exists() for path in theirs)
    assert len(said) == 2
    assert all("latentmake did not make it" in line for line in said)


# -- orders ---------------------------------------------------------------------------------------

items = st.builds(
    Item,
    stem=st.text(st.characters(codec="utf-8")),
    files=st.lists(
        st.builds(
            File,
            role=st.sampled_from([IMAGE, CAPTION, CONTROL, LAYER]),
            path=stems,
            stat=st.just(NO_STAT),  # an order holds none
        )
    ).map(tuple),
    texts=st.none() | st.lists(stems, max_size=3),
    span=st.none() | st.builds(Span, st.integers(0, 9), st.none() | st.integers(1, 9)),
    row=st.none() | st.dictionaries(stems, st.none() | stems | st.integers()),
    window=st.none() | st.tuples(st.floats(0, 9), st.none() | st.floats(0, 9)),
)
members = st.builds(
    Member,
    dataset=stems,
    item=items,
    targets=st.dictionaries(
        stems, st.lists(st.tuples(stems, st.one_of(st.none(), stems)), max_size=3)
    ),
    text=st.none() | st.tuples(stems, stems),
)


@settings(deadline=None)
@given(st.lists(members, max_size=4))
def test_an_order_survives_being_written_and_read(found: list[Member]) -> None:
    work = order(*found, orphans=["cache/é"], faults={"cats": [fault("x\u2028")]})
    Path("order.json").write_text(work.model_dump_json())
    assert ManifestOrder.read(Path("order.json")) == work


def test_the_lock_of_a_run_that_holds_nothing_out_is_as_it_always_was() -> None:
    write(order(item("a"), item("b")))
    found = json.loads((FOLDER / "dataset.lock").read_bytes())
    assert sorted(found) == ["aside", "counts", "digest", "images", "manifest", "parts", "repeats"]
    assert found["digest"] == "9f483929c019d673fc30177ca60362c3c36ac499e6b65766d4e116afeb667d5e"


@pytest.mark.parametrize(("stem", "source", "group"), GROUPS)
def test_an_items_group_is_its_label_or_its_folder(stem: str, source: str, group: str) -> None:
    row = Row(dataset="films", stem=stem, source=source)
    assert row.group == group
    assert row.model_copy(update={"row": {"label": 3}}).group == "3"
    assert row.model_copy(update={"row": {"label": ""}}).group == group
