"""MP4 files that a browser plays."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.errors import StorageError, storage_error
from latentmake.files import atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CODEC = "libx264"
_QUALITY = "17"  # x264's constant rate factor: hardly to be told from the frames
_BT709 = 1  # in FFmpeg's tables of primaries, transfer and matrix
_LIMITED = 1  # range of the values: 16 to 235


def write_mp4(path: Path, frames: Iterable[NDArray[np.uint8]], fps: float = 16) -> None:
    """Write frames as H.264, yuv420p, BT.709, with the index at the beginning of the file.

    The same frames give the same bytes on one machine: one thread, and no time of day. An odd width
    or height is made even by repeating the last column or row.

    Args:
        path: of the file; its folder is made where it is missing.
        frames: each [H, W, 3], 0 to 255, all of one size.
        fps: frames a second.

    Raises:
        StorageError: the disk is full or cannot be written.
        ValueError: there is no frame.
    """
    import av
    import numpy as np
    from av.video.reformatter import ColorRange, Colorspace

    left = iter(frames)
    if (first := next(left, None)) is None:
        raise ValueError("a clip has no frame")
    height, width = first.shape[:2]
    colors: Any = {"dst_colorspace": Colorspace.ITU709, "dst_color_range": ColorRange.MPEG}
    container = {"movflags": "faststart", "fflags": "+bitexact"}
    settings = {"crf": _QUALITY, "preset": "medium"}
    with atomic.replacing(path) as temporary:
        try:
            with av.open(str(temporary), "w", format="mp4", options=container) as file:
                rate = Fraction(fps).limit_denominator(1001)
                stream: Any = file.add_stream(_CODEC, rate=rate, options=settings)
                stream.width, stream.height = width + width % 2, height + height % 2
                stream.pix_fmt = "yuv420p"
                context = stream.codec_context
                context.thread_count = 1
                context.color_primaries = context.color_trc = context.colorspace = _BT709
                context.color_range = _LIMITED
                for frame in chain([first], left):
                    even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), "rgb24")
                    file.mux(stream.encode(picture.reformat(format="yuv420p", **colors)))
                file.mux(stream.encode())
        except av.FFmpegError as error:
            raise storage_error(error, path) or StorageError(
                f"cannot be written ({error.strerror})", where=path, hint="check the folder"
            ) from None


def spread_frames(path: Path, count: int) -> list[NDArray[np.uint8]]:
    """Return frames of a clip that `write_mp4` wrote, evenly spread from the first to the last.

    A clip of fewer frames gives all it has.

    Raises:
        StorageError: it is gone or damaged.
    """
    import av

    try:
        with av.open(str(path)) as file:
            frames = list(file.decode(video=0))
            last, count = len(frames) - 1, min(count, len(frames))
            places = [round(last * number / max(1, count - 1)) for number in range(count)]
            found: list[Any] = [frames[place].to_ndarray(format="rgb24") for place in places]
            return found
    except (av.FFmpegError, IndexError) as error:
        raise StorageError(
            f"this clip cannot be read ({error})",
            where=path,
            hint="delete it and run the same command again, which draws it anew",
        ) from None
