"""A manifest names what a run trains on; its lock has one digest of it, the planner's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
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
from refusals import refused
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


pytestmark = pytest.mark.usefixtures("own_folder")


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
        "run": "first", "model": "tiny", "repeats": {"cats": 1}, "skip": [], "items": list(items),
        "faults": {}, "orphans": [], "planned": 5,
    }  # fmt: skip
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
    path = f"data/{stem}.png"
    line = f"{path}: is damaged; replace it"
    return {"dataset": dataset, "stem": stem, "path": path, "digest": "d", "line": line}


def receipt(targets: dict[str, str] | None = None, *faults: dict[str, str]) -> Receipt:
    made = {path: [1, 2, 3, key] for path, key in (targets or {}).items()}
    return Receipt({}, made, list(faults), {}, 1.0)


def test_each_item_is_one_line_with_the_paths_of_its_caches() -> None:
    odd = "a\u2028b\u0085c\u2029d"
    lock = write(order(item(odd), item("sub/é"), repeats={"cats": 3}), receipt())
    text = (FOLDER / "manifest.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["stem"] for line in text.splitlines()] == [odd, "sub/é"]
    assert rows()[1] == {
        "dataset": "cats",
        "stem": "sub/é",
        "source": "data/sub/é.png",
        "repeats": 3,
        "latents": {"64": "cache/cats/tiny/64/sub/é.latents.safetensors"},
        "text": "cache/cats/tiny/text/sub/é.text.safetensors",
    }
    assert read_lock("first") == lock and lock.counts == {"cats/64": 2, "cats/text": 2}


def test_the_planners_digest_is_the_jobs() -> None:
    keys = {"a": "1f", "é/b": "2e", "ü": "30"}
    items = [item(stem, key_64=key, key_text=key[::-1]) for stem, key in keys.items()]
    lock = write(order(*items, repeats={"cats": 2}))
    parts = {
        "cats/64": keys_digest(keys.items()),
        "cats/text": keys_digest((stem, key[::-1]) for stem, key in keys.items()),
    }
    assert lock.parts == parts
    assert lock.digest == lock_digest(parts, {"cats": 2})
    assert lock.digest == lock_digest(dict(reversed(parts.items())), {"cats": 2})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(0, 60))
def test_regularisation_images_are_balanced_as_in_sd_scripts(
    repeats: list[int], images: int
) -> None:
    """`DreamBoothDataset.__init__` of its library/train_util.py counts like this."""
    found, n, first = [0] * len(repeats), 0, True
    while n < images:
        for place, count in enumerate(repeats):
            found[place] += count if first else 1
            n += count if first else 1
            if n >= images:
                break
        first = False
    assert balanced(repeats, images) == found


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
    work = order(item("a", key_64="planned", key_text=None))
    lock = write(work, receipt(made))
    assert lock.parts["cats/64"] == keys_digest([("a", "made")])
    assert lock.parts["cats/text"] == keys_digest([("a", "in the file")])
    assert write(work).parts["cats/64"] == keys_digest([("a", "planned")])


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


def test_faults_fail_with_every_line_and_write_nothing() -> None:
    orphan = make("gone", "64", "k")
    work = order(item("a"), item("b"), item("c"), faults={"cats": [fault("b")]}, orphans=[orphan])
    line = refused(lambda: write(work, receipt({}, fault("c"))), "run first", DatasetError)
    assert line.startswith("run first: 2 faulty: ")
    assert "data/b.png: is damaged" in line and "data/c.png: is damaged" in line
    assert line.endswith("all other items are done; set on_error: skip to train without these")
    assert not FOLDER.exists() and Path(orphan).exists()
    work = order(item("a"), item("b", "dogs"), skip=["cats"], repeats={"cats": 1, "dogs": 1})
    both = receipt({}, fault("a"), fault("b", "dogs"))
    assert "1 faulty" in refused(lambda: write(work, both), kind=DatasetError)
    work = order(item("a"), skip=["cats"])
    with pytest.raises(DatasetError, match=r"^run first: no item is left to train on"):
        write(work, receipt({}, fault("a")))


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


def test_orphans_of_ours_are_removed_with_the_folders_they_leave_empty() -> None:
    said: list[str] = []
    gone, kept, folder = (
        make("sub/deep/gone", "64", "k"),
        make("a", "64", "k"),
        "cache/cats/tiny/64",
    )
    half = Path(folder, f".x{atomic.TEMPORARY_SUFFIX}")
    half.write_bytes(b"half")
    write(order(item("a"), orphans=[gone, str(half)]), say=said.append)
    assert not Path(folder, "sub").exists() and not half.exists() and Path(kept).exists()
    assert said == ["removed 2 cache files whose items are gone"]
    said.clear()
    write(order(item("a"), orphans=[make("gone", "64", "k")]), say=said.append)
    assert said == ["removed 1 cache file whose item is gone"]
    theirs = [Path(folder, f"{name}.latents.safetensors") for name in ("theirs", "notes", "gone")]
    save_file({"x": torch.ones(1)}, theirs[0])
    theirs[1].write_text("not even safetensors")
    write(order(item("a"), orphans=[str(path) for path in theirs]), say=said.append)
    assert theirs[0].exists() and theirs[1].exists() and len(said) == 3
    assert all("latentmake did not make it" in line for line in said[1:])


def test_an_order_survives_being_written_and_read() -> None:
    roles = [File(role, f"{role} é", NO_STAT) for role in (IMAGE, CAPTION, CONTROL, LAYER)]
    found = [
        Member("d", Item("é", tuple(roles), None), {}),
        Member("d", Item("b", (), ["one", "two"], span=Span(3, None)), {"64": [("a", None)]}),
        Member(
            "d",
            Item("c", (), [], span=Span(0, 9), row={"x": None, "y": "z", "n": 3}, window=(0.5, 1)),
            {"64": [("a", "k"), ("b", None)], "text": []},
            text=("p", "k"),
        ),
    ]
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
