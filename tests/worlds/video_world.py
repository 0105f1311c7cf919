"""Small real videos for tests, each frame of which can be told from the others."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray


def scene(count: int, width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    """Yield moving gradients with a patch of noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    for index in range(count):
        red, green = columns * 3 + index * 5, rows * 2 + index * 3
        blue = (rows + columns) // 2 + index * 7
        picture = (np.stack([red, green, blue], axis=-1) % 256).astype(np.uint8)
        dice = np.random.default_rng(index)
        picture[: height // 4, : width // 4] = dice.integers(0, 256, (height // 4, width // 4, 3))
        yield picture


def write_video(
    path: Path,
    codec: str,
    count: int = 24,
    *,
    size: tuple[int, int] = (64, 48),
    format: str = "yuv420p",
    container: dict[str, str] | None = None,
    **options: str,
) -> Path:
    """Encode a scene; skips the test where this FFmpeg lacks the encoder."""
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    with av.open(str(path), "w", options=container or {}) as file:
        stream = file.add_stream(codec, rate=24, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = format
        stream.codec_context.thread_count = 1
        for picture in scene(count, *size):
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return path


def rewrap(
    source: Path,
    path: Path,
    *,
    skip_keys: int = 0,
    earlier: float = 0.0,
    container: dict[str, str] | None = None,
) -> Path:
    """Write the packets of a video to another file, undecoded.

    Args:
        source: the video.
        path: the other file.
        skip_keys: how many key frames to leave out at the beginning, with what comes after each.
        earlier: seconds by which each frame is moved, below zero if need be.
        container: options of the other file.
    """
    with av.open(str(source)) as old, av.open(str(path), "w", options=container or {}) as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        shift = int(earlier / stream.time_base)
        keys = 0
        for packet in old.demux(stream):
            if packet.size == 0:  # PyAV's own, at the end
                continue
            keys += packet.is_keyframe
            if keys > skip_keys:
                packet.stream = copy
                packet.pts -= shift
                packet.dts -= shift
                new.mux(packet)
    return path


# Name of a file, its encoder, and options of that.
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "h264.mp4": ("libx264", {"bf": "3"}),
    "h264.mkv": ("libx264", {"bf": "3"}),
    "h264.avi": ("libx264", {"bf": "0"}),
    "h264.flv": ("libx264", {"bf": "2"}),
    "mpeg4.mp4": ("mpeg4", {"bf": "2"}),
    "mpeg4.avi": ("mpeg4", {"bf": "2"}),
    "vp9.webm": ("libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "8", "cpu-used": "8"}),
    "vp8.webm": ("libvpx", {"auto-alt-ref": "1", "lag-in-frames": "8", "cpu-used": "8"}),
    "h265.mkv": ("libx265", {"x265-params": "log-level=none:pools=1:frame-threads=1"}),
    "mpeg2.mpg": ("mpeg2video", {"bf": "2"}),
    "mpeg1.mpeg": ("mpeg1video", {}),
    "wmv2.wmv": ("wmv2", {}),
    "ffv1.mkv": ("ffv1", {}),
    "prores.mov": ("prores_ks", {"format": "yuv422p10le"}),
}


def write_kind(folder: Path, name: str, count: int = 24) -> Path:
    """Write one of `KINDS`."""
    codec, options = KINDS[name]
    format = options.get("format", "yuv420p")
    others = {key: value for key, value in options.items() if key != "format"}
    return write_video(folder / name, codec, count, format=format, **others)


def write_timed(path: Path, times: list[int], codec: str = "libx264") -> Path:
    """Encode a scene whose frames have timestamps in milliseconds."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=1000)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for time, picture in zip(times, scene(len(times), 64, 48), strict=False):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def turn(path: Path) -> Path:
    """Write into an MP4 that its pictures are to be turned by a quarter for display."""
    data = bytearray(path.read_bytes())
    one, none = (1 << 16).to_bytes(4, "big"), bytes(4)
    straight = one + none * 3 + one
    turned = none + one + none + (-1 << 16).to_bytes(4, "big", signed=True) + none
    place = data.rindex(straight)  # in the track's header, which follows that of the film
    data[place : place + len(turned)] = turned
    path.write_bytes(data)
    return path
