"""From a row of a list to the pixels that its clips are encoded from, against reading on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from clip_world import Encoder, fingerprint, order_of
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data import lists
from latentmake.data.item import Scan
from latentmake.data.memo import Memo
from latentmake.data.probe import measured
from latentmake.encode.reading import Loaded
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of
from latentmake.plan.orders import Order, Target, Work
from numpy.typing import NDArray
from order_world import carry_out, silent
from safetensors.torch import load_file
from video_world import turn, write_timed, write_video

TIMES = [0, 30, 90, 150, 200, 420, 430, 440, 450, 700, 760, 830, 900, 960, 1040]
WAN = Model.model_validate({"task": "t2v-1.3B", "vae": "vae", "text": "text"})
SETTINGS: dict[str, Any] = {"target_frames": [5], "frame_extraction": "chunk", "fit": "crop"}

Frames = list[tuple[float, NDArray[np.uint8]]]

pytestmark = pytest.mark.usefixtures("own_folder")


def decoded(path: Path) -> Frames:
    """Seconds from the first frame, and pixels of each."""
    with av.open(str(path)) as file:
        frames = [(frame.time, np.array(frame.to_image())) for frame in file.decode(video=0)]
    return [(time - frames[0][0], pixels) for time, pixels in frames]


def clips_of(row: dict[str, Any], size: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Encode the clips of a row; clip -> its fingerprint."""
    Path("list.jsonl").write_text(json.dumps({"prompt": "p", **row}))
    asked = Dataset.model_validate({"path": "list.jsonl", **SETTINGS, **settings})
    memo, layout = Memo(None), layout_of("musubi")
    scan = lists.scan("d", asked)
    assert scan.items is not None
    (item,), faults, _ = measured(layout, asked, scan, scan.items, Scan("", [], ""), memo, WAN)
    assert scan.faults == faults == []
    source = item.inputs(size, layout)
    named = layout.named("cache/d/m/x", size, source.stem, source.media, asked, source.span)
    width_height = Size(*map(int, size.split("x")))
    targets = tuple(Target(size, path, None, width_height, clip) for path, clip in named)
    order: Order = order_of(Work(source, targets), **asked.model_dump())
    carry_out(order, say=silent, encoder=Loaded(Encoder(), 1))
    return {path: load_file(path)["latents"] for path, _ in named}


def at_sixteen(frames: Frames, first: int, end: float) -> list[NDArray[np.uint8]]:
    """The frame on the screen at each 16th of a second, from that of a first frame on."""
    begin, shown = frames[first][0], []
    while begin + len(shown) / 16 < end - 0.002:
        due = begin + len(shown) / 16 + 0.00125
        shown.append([pixels for time, pixels in frames if time <= due][-1])
    return shown


# What spans and rates are is shown in tests/unit/geometry; here they reach the file.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Frames], Any]]] = {
    "auto with a stride": (
        {"stride": 2},
        {"source_fps": "auto"},
        lambda frames: at_sixteen(frames, 0, 1.12)[::2],
    ),
    "auto of seconds": (
        {"start": 0.2, "end": 0.7},
        {"source_fps": "auto"},
        lambda frames: at_sixteen(frames, 4, 0.7),
    ),
    "one clip": (
        {"first_frame": 3, "frames": 5, "stride": 2},
        {},
        lambda frames: [pixels for _, pixels in frames[3:][::2]],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_clips_of_a_row_are_those_of_reading_the_film_by_its_clock(way: str) -> None:
    row, settings, expected = WAYS[way]
    path = write_timed(Path("a.mkv"), TIMES)
    found = clips_of({"video": "a.mkv", **row}, "64x48", **settings)
    frames = expected(decoded(path))
    chunks = [frames[start : start + 5] for start in range(0, len(frames) - 4, 5)]
    assert chunks and len(found) == len(chunks)
    for tensor, chunk in zip(found.values(), chunks, strict=True):
        assert torch.equal(tensor, fingerprint(np.stack(chunk)))


@pytest.mark.parametrize("upright", [True, False])
def test_a_film_on_its_side_is_turned_where_that_is_asked_for(upright: bool) -> None:
    path = turn(write_video(Path("a.mp4"), "libx264", 5))
    with av.open(str(path)) as file:
        angle = next(file.decode(video=0)).rotation  # counterclockwise
    frames = np.stack([pixels for _, pixels in decoded(path)])
    if upright:
        frames = np.rot90(frames, angle // 90, axes=(1, 2))
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    (found,) = clips_of({"video": "a.mp4"}, size, display_rotation=upright).values()
    assert torch.equal(found, fingerprint(frames))
