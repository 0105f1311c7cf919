"""Plans of publications without caches: their items come from the datasets alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import DatasetError
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.runs.rows import write_items
from PIL import Image


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for stem, size in (("a", (40, 30)), ("b", (64, 64))):
        Image.new("RGB", size).save(f"data/{stem}.png")
        Path(f"data/{stem}.txt").write_text(f"a {stem}")


def items(**dataset: Any) -> list[dict[str, Any]]:
    """Return the rows of a publication whose VAE and text encoder are nowhere."""
    values = {
        "datasets": {"d": {"path": "data", **dataset}},
        "models": {"m": {"task": "t2v-14B", "vae": "E:/vae.pth", "text": "/no/t5", "dit": "/no/d"}},
        "runs": {"r": {"datasets": ["d"], "model": "m", "resolutions": [64]}},
        "publish": {"caches": False},
    }
    listed = write_items(Facts(parse(values), Memo(Path("memo.sqlite"))), "r")
    return [json.loads(line) for line in listed.read_text().splitlines()]


def test_a_text_that_is_composed_is_published_as_it_is_composed() -> None:
    found = items(captions={"caption_prefix": "photo of"})
    assert [row["texts"] for row in found] == [["photo of a a"], ["photo of a b"]]


def test_a_faulty_item_stops_a_publication_or_is_left_out() -> None:
    Path("data/b.txt").unlink()
    with pytest.raises(DatasetError, match=r"data/b\.png: has no caption file"):
        items()
    assert [row["stem"] for row in items(on_error="skip")] == ["a"]


def test_what_a_build_here_set_aside_is_left_out_while_it_is_as_it_was() -> None:
    items()
    noted = [
        {"stem": stem, "path": path, "digest": digest.of_file(Path(path)), "line": "is damaged"}
        for stem, path in (("a", "data/a.png"), ("b", "data/b.png"))
    ]
    lock = Path("runs/r/dataset.lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"digest": "x", "aside": {"d": noted[1:]}}))
    assert [row["stem"] for row in items(on_error="skip")] == ["a"]
    assert len(items()) == 2
    lock.write_text(json.dumps({"digest": "x", "aside": {"d": noted}}))
    with pytest.raises(DatasetError, match="no item is left to publish"):
        items(on_error="skip")
    Image.new("RGB", (64, 64), "red").save("data/b.png")
    assert [row["stem"] for row in items(on_error="skip")] == ["b"]
