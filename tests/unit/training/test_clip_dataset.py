"""ClipDataset gives the pixels that caches are made of, from any process and in any order."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import torch
from latentmake.errors import UserError
from latentmake.geometry.clips import kept_indices
from latentmake.training.clip_dataset import ClipDataset, collate_fn
from torch.utils.data import DataLoader
from video_world import write_video

CAPTIONS = {"calm": "a calm sea", "coast/storm": "a storm at the coast", "storm": "a storm"}
SHAPE = {"frames": 5, "height": 32, "width": 48}
CHUNKS = {**SHAPE, "frame_extraction": "chunk"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        path = folder / f"{stem}.mp4"
        path.parent.mkdir(exist_ok=True)
        write_video(path, "libx264", 12 + number, size=(96, 80), bf="3", g="6")
        path.with_suffix(".txt").write_text(f"{caption}\n")
    return folder


def decoded(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as file:
        return [np.array(frame.to_image()) for frame in file.decode(video=0)]


def fitted(frame: np.ndarray) -> np.ndarray:
    """A frame of 96 x 80, scaled down to cover 48 x 32 and cut around its centre."""
    return cv2.resize(frame, (48, 40), interpolation=cv2.INTER_AREA)[4:36]


def test_clips_are_frames_of_a_full_decode_scaled_to_cover_and_cut(videos: Path) -> None:
    clips = ClipDataset(videos, **CHUNKS)
    assert len(clips) == 2 + 2 + 2
    frames = decoded(videos / "calm.mp4")
    for index, first in enumerate((0, 5)):
        item = clips[index]
        values = item["pixel_values"]
        assert values.shape == (5, 3, 32, 48) and values.dtype == torch.float32
        wanted = np.stack([fitted(frame) for frame in frames[first : first + 5]])
        back = ((values + 1.0) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(back, wanted)
        assert torch.equal(values, torch.from_numpy(wanted).permute(0, 3, 1, 2) / 127.5 - 1.0)
        assert -1.0 <= values.min() < 0.0 < values.max() <= 1.0
        assert item["prompt"] == "a calm sea"
        assert item["row"] == {"video": str(videos / "calm.mp4"), "first_frame": first, "stride": 1}


def test_by_default_each_video_gives_its_first_clip(videos: Path) -> None:
    clips = ClipDataset(str(videos), **SHAPE)
    prompts = [clips[index]["prompt"] for index in range(len(clips))]
    assert prompts == list(CAPTIONS.values())  # files of one name in two folders, too


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_give_what_the_process_itself_does(videos: Path, start: str) -> None:
    clips = ClipDataset(videos, **CHUNKS)
    clips[0]  # an open file or decoder would not survive what follows
    loader = DataLoader(
        clips, batch_size=2, num_workers=2, collate_fn=collate_fn, multiprocessing_context=start
    )
    batches = list(loader)
    assert [batch["pixel_values"].shape for batch in batches] == [(2, 5, 3, 32, 48)] * 3
    assert all(batch["frames"] is batch["pixel_values"] for batch in batches)
    assert set(batches[0]) == {"pixel_values", "prompts", "rows"}  # once: nothing is copied twice
    together = torch.cat([batch["pixel_values"] for batch in batches])
    for index in reversed(range(len(clips))):
        assert torch.equal(together[index], clips[index]["pixel_values"])
    prompts = [prompt for batch in batches for prompt in batch["prompts"]]
    assert prompts == [clips[index]["prompt"] for index in range(len(clips))]


def test_it_is_pickled_without_pictures(videos: Path) -> None:
    clips = ClipDataset(videos, **CHUNKS)
    data = pickle.dumps(clips)
    assert len(data) < 20_000
    assert torch.equal(pickle.loads(data)[3]["pixel_values"], clips[3]["pixel_values"])


def refusal(*arguments: object, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        ClipDataset(*arguments, **settings)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line and "; " in line
    return line


def test_mistakes_are_one_line_at_once(videos: Path, tmp_path: Path) -> None:
    for settings, words in (
        ({"frames": 80}, "ClipDataset: `frames` has a length that is not 4 n + 1"),
        ({"frames": 0}, "ClipDataset.frames: 0 should be"),
        ({"height": 40}, "ClipDataset, height or width: 40 pixels are not a multiple of 16"),
        ({"width": 0}, "ClipDataset.width: 0 should be"),
        ({"stride": 0}, "ClipDataset.stride: 0 should be"),
        ({"sample_stride": 0}, "ClipDataset.sample_stride: 0 should be"),
        ({"target_frames": 80}, "ClipDataset: `target_frames` has a length"),
    ):
        assert refusal(videos, **settings).startswith(words)
    assert "frame_extration" in refusal(videos, frame_extration="chunk")
    assert "does not exist" in refusal(tmp_path / "gone", **SHAPE)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    (tmp_path / "broken.txt").write_text("nothing")
    write_video(tmp_path / "mute.mp4", "libx264", 6)
    line = refusal(tmp_path, **SHAPE)
    assert "broken.mp4: is not a video" in line and "mute.mp4: has no caption file" in line
    skipping = ClipDataset(tmp_path, missing_caption="empty", on_error="skip", **SHAPE)
    assert len(skipping) == 1 and skipping[0]["prompt"] == ""


def test_a_video_that_goes_after_listing_is_named(videos: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", "libx264", 6)
    clips = ClipDataset(tmp_path, missing_caption="empty", **SHAPE)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(UserError, match=r"a\.mp4: cannot be read"):
        clips[0]


def test_a_list_may_name_parts_of_videos_npz_clips_and_further_columns(
    videos: Path, tmp_path: Path
) -> None:
    frames = decoded(videos / "calm.mp4")
    np.savez(tmp_path / "ready.npz", frames=np.stack(frames[2:7]))
    np.savez(tmp_path / "short.npz", frames=np.stack(frames[:4]))
    rows = [
        {"video": str(videos / "calm.mp4"), "prompt": "late", "first_frame": 3, "frames": 5},
        {"path": str(videos / "storm.mp4"), "text": "every second", "stride": 2, "mood": "wild"},
        {"npz": "ready.npz", "caption": "made before"},
        {"video": "short.npz", "caption": "too short for a clip"},
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(lines)
    clips = ClipDataset(tmp_path / "train.jsonl", **SHAPE)
    found = {clips[index]["prompt"]: clips[index] for index in range(len(clips))}
    assert found.keys() == {"late", "every second", "made before"}
    storm = decoded(videos / "storm.mp4")
    for prompt, wanted in {
        "late": frames[3:8],
        "every second": storm[0:10:2],
        "made before": frames[2:7],
    }.items():
        pixels = np.stack([fitted(frame) for frame in wanted])
        expected = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1.0
        assert torch.equal(found[prompt]["pixel_values"], expected)
    assert found["late"]["row"]["first_frame"] == 3
    assert found["every second"]["row"] == {
        "mood": "wild",
        "video": str(videos / "storm.mp4"),
        "first_frame": 0,
        "stride": 2,
    }
    (tmp_path / "broken.jsonl").write_text(f"{lines}{{")
    assert "broken.jsonl, line 5: ends in the middle" in refusal(tmp_path / "broken.jsonl", **SHAPE)


def test_stride_repeats_and_rate_are_those_of_a_dataset(videos: Path) -> None:
    thinned = ClipDataset(videos, 5, 32, 48, stride=2, num_repeats=2)
    assert len(thinned) == 6
    frames = decoded(videos / "calm.mp4")
    wanted = np.stack([fitted(frame) for frame in frames[0:10:2]])
    expected = torch.from_numpy(wanted).permute(0, 3, 1, 2) / 127.5 - 1.0
    assert torch.equal(thinned[0]["pixel_values"], expected)
    assert torch.equal(thinned[3]["pixel_values"], expected)
    slow = ClipDataset(videos, 5, 32, 48, source_fps=24.0)
    kept = [index for index, _ in kept_indices(12, 24.0)][:5]
    wanted = np.stack([fitted(frames[index]) for index in kept])
    expected = torch.from_numpy(wanted).permute(0, 3, 1, 2) / 127.5 - 1.0
    assert kept != [*range(5)] and torch.equal(slow[0]["pixel_values"], expected)


def test_shapes_of_one_batch_must_agree(videos: Path) -> None:
    items = [ClipDataset(videos, 5, side, 48)[0] for side in (32, 48)]
    with pytest.raises(ValueError, match=r"pixel_values of one batch have the shapes \["):
        collate_fn(items)
