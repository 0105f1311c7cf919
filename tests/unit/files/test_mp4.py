"""MP4 files: what is written is what a browser plays, and nearly what was given."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from latentmake.errors import StorageError
from latentmake.files.video import write_mp4
from numpy.typing import NDArray


def frames(count: int, width: int, height: int) -> list[NDArray[np.uint8]]:
    rows, columns = np.mgrid[0:height, 0:width]
    return [
        np.stack([columns * 2 + 5 * index, rows * 3, np.full_like(rows, 40 + index)], axis=-1)
        .clip(0, 255)
        .astype(np.uint8)
        for index in range(count)
    ]


def read(path: Path) -> list[NDArray[np.uint8]]:
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_a_clip_is_h264_that_browsers_play(tmp_path: Path) -> None:
    path = tmp_path / "deep/clip.mp4"
    write_mp4(path, frames(9, 64, 48), fps=16)
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    assert 0 < data.index(b"moov") < data.index(b"mdat")  # plays before all of it is there
    with av.open(str(path)) as file:
        (stream,) = file.streams.video
        assert len(file.streams) == 1
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert (stream.width, stream.height, stream.average_rate) == (64, 48, 16)
        assert stream.codec_context.colorspace == 1 and stream.codec_context.color_range == 1
        assert [float(frame.time) for frame in file.decode(stream)] == [n / 16 for n in range(9)]


def test_its_frames_are_nearly_those_given(tmp_path: Path) -> None:
    given = frames(5, 64, 48)
    write_mp4(tmp_path / "clip.mp4", given)
    found = read(tmp_path / "clip.mp4")
    assert len(found) == 5
    worst = max(float(np.abs(a.astype(int) - b).mean()) for a, b in zip(found, given, strict=True))
    assert worst < 4


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_mp4(tmp_path / name, frames(5, 32, 32))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_odd_sides_become_even_by_repeating_the_last_line(tmp_path: Path) -> None:
    write_mp4(tmp_path / "clip.mp4", frames(2, 33, 17))
    assert read(tmp_path / "clip.mp4")[0].shape == (18, 34, 3)


def test_no_frame_is_no_clip_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no frame"):
        write_mp4(tmp_path / "clip.mp4", [])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file become longer than some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_one_line_and_leaves_no_half_clip(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    with pytest.raises(StorageError, match=r"clip\.mp4"):
        write_mp4(tmp_path / "clip.mp4", list(noise))
    assert not list(tmp_path.iterdir())
