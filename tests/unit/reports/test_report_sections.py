"""Caches and training of a report: sizes by headers, curves, sample pictures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_world import make_run
from latentmake.config import Model
from latentmake.files import cachefile, npz
from latentmake.reports.items_order import ItemsOrder
from latentmake.reports.report_caches import buckets_section, caches_section
from latentmake.reports.report_order import PartReport, ReportOrder
from latentmake.reports.report_training import training_section
from torch.utils.tensorboard import SummaryWriter
from video_world import write_video

POINTS = 1000


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_order(*parts: PartReport, planned: float = 0.0) -> ReportOrder:
    model = Model.model_validate({"vae": "vae", "text": ["text"]})
    empty: dict[str, Any] = {"datasets": {}, "recipes": {}, "items": [], "skipped": []}
    contact = ItemsOrder(run="r", model_name="m", model=model, total=0, **empty)
    return ReportOrder(
        contact=contact, trainer=None, parts=[*parts], recipes={}, speeds=[], planned=planned
    )


def write(path: str, **tensors: tuple[int, ...]) -> str:
    if path.endswith(".npz"):
        arrays = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
        data = npz.serialize(arrays, {})
    else:
        data = cachefile.serialize(
            {name: torch.ones(shape) for name, shape in tensors.items()}, {"a": "b"}
        )
    Path(path).write_bytes(data)
    return path


def buckets(*paths: str) -> list[list[int]]:
    order = make_order(PartReport("cats", "64", 0, {}, 0, [*paths]))
    (found,) = buckets_section(order)
    sizes: list[list[int]] = found["sizes"]
    return sizes


def test_sizes_are_read_off_the_headers_of_every_layout() -> None:
    plain = [write(f"{n}.safetensors", latents=(4, 6, 8)) for n in range(3)]
    clip = write("clip.safetensors", latents_21x6x10_float32=(16, 21, 6, 10), image=(1, 2))
    archive = write("x.npz", **{"latents_5x7": (16, 5, 7), "original_size_5x7": (2,)})
    assert buckets(*plain, clip, archive) == [[7, 5, 1, 1], [8, 6, 1, 3], [10, 6, 21, 1]]


def test_files_that_are_gone_or_damaged_are_not_counted() -> None:
    whole = write("a.safetensors", latents=(4, 6, 8))
    Path("b.safetensors").write_bytes(Path(whole).read_bytes()[:-1])
    Path("c.npz").write_bytes(b"PK\x03\x04 and no more")
    other = write("d.safetensors", something=(4, 6, 8))
    assert buckets(whole, "b.safetensors", "c.npz", other, "e.safetensors") == [[8, 6, 1, 1]]


def test_what_was_made_since_the_plan_is_fresh() -> None:
    paths = [write(f"{n}.safetensors", latents=(4, 6, 8)) for n in range(3)]
    part = PartReport("cats", "64", 5, {"new": 2, "edited": 2}, 1, [*paths, "missing"])
    (row,) = caches_section(make_order(part, planned=time.time() - 60))
    assert (row["fresh"], row["stale"], row["files"]) == (8, {"edited": 1}, 3)
    assert row["bytes"] == 3 * Path(paths[0]).stat().st_size
    (row,) = caches_section(make_order(part, planned=time.time() + 60))
    assert (row["fresh"], row["stale"]) == (5, {"new": 2, "edited": 2})


def trained(said: list[str] | None = None) -> dict[str, Any]:
    found = training_section("r", (said if said is not None else []).append)
    assert found is not None
    return found


def test_without_any_training_there_is_nothing() -> None:
    assert training_section("r", print) is None
    Path("runs/r").mkdir(parents=True)
    assert training_section("r", print) is None


def test_curves_of_any_trainer_have_at_most_some_hundred_points() -> None:
    writer = SummaryWriter("runs/r/output/logs/network_train")
    for step in range(POINTS):
        writer.add_scalar("loss/average", float(step), step)
    writer.add_scalar("once", float("nan"), 3)
    writer.close()
    loss, once = trained()["curves"]
    assert loss["name"] == "loss/average"
    assert len(loss["steps"]) == len(loss["values"]) == 400
    assert loss["steps"][-1] == POINTS - 1
    assert np.mean(loss["values"]) == pytest.approx((POINTS - 1) / 2, rel=0.01)
    assert once == {"name": "once", "steps": [3], "values": [None], "average": None}


def test_of_many_steps_some_are_shown_with_the_first_and_the_last() -> None:
    make_run("r", ["a", "b"], range(0, 100, 10))
    found = trained()["samples"]
    assert found["steps"] == [0, 20, 40, 50, 70, 90]
    assert found["total"] == [10, 2]
    assert [len(row) for row in found["pictures"]] == [2] * 6
    assert all(each["pixels"] for row in found["pictures"] for each in row)


def test_a_large_picture_is_scaled_down_and_a_damaged_one_is_told() -> None:
    make_run("r", ["a", "b"], [5], size=(800, 400))
    Path("runs/r/samples/step-000005_01.png").write_bytes(b"no picture")
    said: list[str] = []
    ((large, damaged),) = trained(said)["samples"]["pictures"]
    assert (large["width"], large["height"], large["pixels"]) == (384, 192, False)
    assert damaged is None
    assert len(said) == 1 and "step-000005_01.png" in said[0]


def test_a_clip_is_shown_by_its_middle_frame() -> None:
    make_run("r", ["a"], [5])
    write_video(Path("runs/r/samples/step-000005_00.mp4"), "libx264", 9)
    index = Path("runs/r/samples/index.json")
    index.write_text(index.read_text().replace("_00.png", "_00.mp4"))
    (((clip,),),) = [trained()["samples"]["pictures"]]
    assert (clip["width"], clip["height"]) == (64, 48)
    assert clip["source"].startswith("data:image/png;base64,")
