"""Clips are cut frame by frame; a fault is named and stops no other; a full disk is foreseen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from latentmake.base.digest import source_stat
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.data.item import IMAGE, File, Item
from latentmake.formats.media import probe_video
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Span
from latentmake.trainers.exchange.clip_files import ClipFile, ClipsOrder
from latentmake.trainers.exchange.cut_clips import cut
from video_world import write_video

SIZE = Size(48, 32)
WHOLE = Span()


def file_of(
    path: Path, start: int, frames: int = 5, size: Size = SIZE, span: Span = WHOLE
) -> ClipFile:
    item = Item(
        path.stem,
        (File(IMAGE, str(path), source_stat(path.stat())),),
        [f"of {path.stem}"],
        probe_video(str(path)),
        span,
        {"mood": "calm"},
    )
    return ClipFile(
        f"{path.stem}_{start:05d}-{frames:03d}",
        "films",
        size,
        item,
        Clip(start, frames),
    )


def order_of(folder: Path, *files: ClipFile, skip: bool = False) -> ClipsOrder:
    films = Dataset(path="films", target_frames=[5], on_error="skip" if skip else "fail")
    order = ClipsOrder(
        run="tiny",
        folder=str(folder / "clips"),
        files=list(files),
        datasets={"films": films},
        faults={},
        receipt=str(folder / "receipt.json"),
    )
    return ClipsOrder.model_validate_json(order.model_dump_json())  # as the job reads it


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("videos")
    return [write_video(folder / f"{stem}.mp4", "libx264", 20, size=(64, 48)) for stem in "ab"]


def test_overlapping_clips_share_one_pass_and_each_has_its_own_frames(
    videos: list[Path], tmp_path: Path
) -> None:
    files = [file_of(videos[0], start) for start in (0, 3, 4, 15)]
    whole = file_of(videos[0], 0, frames=17, span=Span(first=3))
    assert cut(order_of(tmp_path, *files, whole), say=print)["written"] == 5
    with np.load(tmp_path / f"clips/{whole.name}.npz") as archive:
        frames = archive["frames"]
    for file, start in zip(files, (0, 3, 4, 15), strict=True):
        path = tmp_path / f"clips/{file.name}.npz"
        need = order_of(tmp_path / "empty", file).need.size
        assert path.stat().st_size <= need <= path.stat().st_size + 1024
        with np.load(path) as archive:
            wanted = frames[max(start - 3, 0) : start - 3 + 5]
            assert np.array_equal(archive["frames"][-len(wanted) :], wanted)
    rows = [json.loads(line) for line in (tmp_path / "clips/train.jsonl").read_text().splitlines()]
    assert {row["mood"] for row in rows} == {"calm"} and rows[4]["source_first_frame"] == 3


def test_a_broken_video_is_named_and_stops_no_other(videos: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(videos[0].read_bytes())
    files = [file_of(broken, 0), file_of(videos[1], 0)]
    broken.write_bytes(videos[0].read_bytes()[:2000])
    lines: list[str] = []
    with pytest.raises(SourceError, match=r"1 faulty: .*broken\.mp4") as caught:
        cut(order_of(tmp_path, *files), say=lines.append)
    assert "\n" not in str(caught.value) and any("faulty: " in line for line in lines)
    assert {path.name for path in (tmp_path / "clips").iterdir()} == {"b_00000-005.npz"}
    counts = cut(order_of(tmp_path, *files, skip=True), say=print)
    assert (counts["written"], counts["kept"], counts["faulty"]) == (0, 1, 1)
    (row,) = (tmp_path / "clips/train.jsonl").read_text().splitlines()
    path = f"{tmp_path}/clips/b_00000-005.npz"
    assert json.loads(row)["npz"] == json.loads(row)["video"] == path
