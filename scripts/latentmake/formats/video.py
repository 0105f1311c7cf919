"""Frames of videos and npz clips by index, exactly as a full sequential decode returns them.

To skip many frames, reading seeks to a key frame, if the packets show for certain which frame that
is. If a decoded frame then differs from the packets, the file is decoded from the beginning.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, dropwhile, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from latentmake.base import atomic
from latentmake.base.errors import SourceError, StorageError
from latentmake.formats.endings import NPZ
from latentmake.formats.media import frame_packets, opened, opened_video, probe_video
from latentmake.geometry.clips import Media

if TYPE_CHECKING:
    import numpy as np
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

_FAR = 48  # up to this many frames, decoding is faster than seeking
_ALIVE = 256  # skipped frames, or packets, between two signs of life
_REPLACE = "convert it again, replace or remove it"

# Types of the NAL units where decoding can start, for FFmpeg's filter `filter_units`: IDR pictures
# of H.264 (its other key frames may depend on earlier frames) and HEVC's random access points. ""
# means that decoding can start at any key frame. All other codecs are decoded from the beginning.
_UNITS = {"h264": "5", "hevc": "16-21", "vp9": "", "av1": "", "libdav1d": "", "prores": ""}


class EndedError(SourceError):
    """A file has fewer frames than are needed.

    Attributes:
        frames: number of frames in the file.
    """

    frames = 0


def _ended(path: str, frames: int, needed: int) -> EndedError:
    what = f"ends after {frames} frames, but frame {needed} is needed"
    error = EndedError(what, where=path, hint=_REPLACE)
    error.frames = frames
    return error


# -- frames ---------------------------------------------------------------------------------------


_Index = tuple[Sequence[int], Sequence[int]]
"""Timestamps of all frames, and of the frames where decoding can start; both ascending."""

_indices: dict[str, _Index | None] = {}  # path -> index, only of the file that was last read


def read_frames(path: str, wanted: Iterable[int]) -> Iterator[tuple[int, NDArray[np.uint8] | None]]:
    """Yield (index, RGB [H, W, 3]) of frames of a video or npz clip, in this process.

    While other frames are decoded, a pair with None comes now and then as a sign of life.

    Args:
        path: path of the file.
        wanted: ascending indices of frames in display order, without duplicates.

    Raises:
        SourceError: the file cannot be read, is no video, or is damaged before the last frame.
        EndedError: the file has too few frames.
    """
    left = deque(wanted)
    if path.lower().endswith(NPZ):
        yield from _npz_frames(path, left)
        return
    is_far = any(after - before > _FAR for before, after in pairwise([0, *left]))
    if is_far and path not in _indices:
        index = yield from _read_index(path)
        _indices.clear()
        _indices[path] = index
    if not (yield from _decoded(path, left, _indices[path] if is_far else None)):
        yield from _decoded(path, left, None)


def frame_of(path: str, index: int) -> Iterator[NDArray[np.uint8] | None]:
    """Yield one frame, and None as a sign of life before it; raises the errors of `read_frames`."""
    return (pixels for _, pixels in read_frames(path, [index]))


def _decoded(
    path: str, left: deque[int], index: _Index | None
) -> Generator[tuple[int, NDArray[np.uint8] | None], None, bool]:
    """Yield frames and remove their indices from `left`; see `read_frames`.

    Returns:
        False if frames are damaged or differ from the index. Then the caller decodes the complete
        file.
    """
    import numpy as np

    position = -1
    with opened_video(path) as (container, stream, _):
        frames: Iterator[Any] = container.decode(stream)  # PyAV's types are incomplete
        times, entries = index or ((), ())
        while left:
            if position >= 0 and position + _FAR < left[0] < len(times):
                place = bisect_right(entries, times[left[0]]) - 1
                start = bisect_left(times, entries[place])
                if start - position > _FAR:
                    frames = _from_entry(container, stream, entries, place)
                    position = start - 1
            try:
                frame = next(frames, None)
            except Exception:
                if index:
                    return False
                raise
            position += 1
            if index and not _agrees(times, position, frame):
                return False
            if frame is None:
                raise _ended(path, position, left[0])
            if frame.is_corrupt:  # FFmpeg fills such frames with guesses
                what = f"is damaged at frame {position}"
                raise SourceError(what, where=path, hint=_REPLACE)
            if position == left[0]:
                yield left.popleft(), np.ascontiguousarray(frame.to_ndarray(format="rgb24"))
            elif position % _ALIVE == 0:
                yield position, None
    return True


def _agrees(times: Sequence[int], position: int, frame: VideoFrame | None) -> bool:
    """Whether a frame matches the index. An interlaced one may have two packets, so it does not."""
    if frame is None or frame.interlaced_frame or frame.is_corrupt:
        return False
    return position < len(times) and frame.pts == times[position]


def _read_index(path: str) -> Generator[tuple[int, None], None, _Index | None]:
    """Read a file's packets without decoding them, and yield signs of life meanwhile.

    Returns:
        The index; None if it is not certain that each packet is a frame.
    """
    from av import Packet
    from av.bitstream import BitStreamFilterContext

    times, entries = array("q"), list[int]()
    with contextlib.suppress(SourceError):
        with opened_video(path) as (container, stream, _):
            if (units := _UNITS.get(stream.codec_context.name)) is None:
                return None
            name = f"filter_units=pass_types={units}" if units else "null"
            pick = BitStreamFilterContext(name, stream)
            for packet, pts in frame_packets(container, stream):
                if packet.has_sidedata("new_extradata") or packet.has_sidedata("palette"):
                    return None
                times.append(pts)
                if len(times) % _ALIVE == 0:
                    yield 0, None
                if packet.is_keyframe and pick.filter(Packet(bytes(packet))):
                    entries.append(pts)
        times, entries = array("q", sorted(times)), sorted(entries)
        if entries[:1] == [*times[:1]] and all(one < other for one, other in pairwise(times)):
            return times, entries
    return None


def _from_entry(
    container: InputContainer, stream: VideoStream, entries: Sequence[int], place: int
) -> Iterator[VideoFrame]:
    """Yield the frames from an entry of the index on.

    Some demuxers do not seek by presentation timestamps and reach the next entry. So this seeks to
    the previous entry and reads on from there without decoding.
    """
    container.seek(entries[max(place - 1, 0)], stream=stream)
    entry = entries[place]
    for packet in dropwhile(lambda packet: packet.pts != entry, container.demux(stream)):
        for frame in packet.decode():
            # Leading frames of an entry are shown before it, and may refer to missing frames.
            if frame.pts is None or frame.pts >= entry:
                yield frame


def probe(path: str) -> Iterator[Media]:
    """Yield size and length of a video or npz clip; raises SourceError."""
    if not path.lower().endswith(NPZ):
        yield probe_video(path)
        return
    with _opened_npz(path) as (_, (frames, height, width, _)):
        yield Media(width, height, frames)


# -- npz clips ------------------------------------------------------------------------------------

_SAVE = "write it with numpy.savez(path, frames), frames uint8 of shape [F, H, W, 3]"


def _npz_frames(path: str, left: deque[int]) -> Iterator[tuple[int, NDArray[np.uint8] | None]]:
    import numpy as np

    with _opened_npz(path) as (member, (frames, *shape)):
        for index in range(left[-1] + 1 if left else 0):
            if index >= frames:
                raise _ended(path, frames, left[0])
            data = member.read(math.prod(shape))
            if len(data) != math.prod(shape):
                raise SourceError("is cut short", where=path, hint=_SAVE)
            if index == left[0]:
                yield left.popleft(), np.frombuffer(data, np.uint8).reshape(shape)


@contextlib.contextmanager
def _opened_npz(path: str) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Open the array of a clip without pickles, and yield it after its header, with its shape."""
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith(".npy")]
                name = "frames.npy" if "frames.npy" in names or len(names) != 1 else names[0]
                if name not in names:
                    what = f"holds {len(names)} arrays, none of which is called frames"
                    raise SourceError(what, where=path, hint=_SAVE)
                with archive.open(name) as member:
                    shape, is_fortran, dtype = readers[npy.read_magic(member)](member)
                    is_clip = len(shape) == 4 and shape[-1] == 3 and min(shape) > 0
                    if not is_clip or dtype.str != "|u1" or is_fortran:
                        order = " in Fortran's order" if is_fortran else ""
                        what = f"holds {dtype} {[*shape]}{order}, no clip"
                        raise SourceError(what, where=path, hint=_SAVE)
                    yield member, shape
        except SourceError:
            raise
        except Exception as error:  # zipfile and zlib raise many types of errors for a damaged file
            what = f"is damaged or no npz file ({error or type(error).__name__})"
            raise SourceError(what, where=path, hint="write it again, or remove it") from None


_CODEC = "libx264"
_QUALITY = "17"  # x264's constant rate factor: the loss is hardly visible
_TREE = "0"  # x264's mbtree is off: once in some thousand clips, it would change the bytes
_BT709 = 1  # number of BT.709 in FFmpeg's tables of primaries, transfer and matrix
_LIMITED = 1  # FFmpeg's number of the range 16 to 235


def write_mp4(path: Path, frames: Iterable[NDArray[np.uint8]], fps: float = 16) -> None:
    """Write frames as H.264, yuv420p, BT.709, with the index at the beginning of the file.

    On one machine, the same frames give the same bytes: there is one thread, and no time stamp. An
    odd width or height is made even by repeating the last column or row.

    Args:
        path: path of the file; a missing folder is created.
        frames: frames [H, W, 3], 0 to 255, all of the same size.
        fps: frames per second.

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
    settings = {"crf": _QUALITY, "preset": "medium", "mbtree": _TREE}
    with (
        atomic.replacing(path) as temporary,
        av.open(str(temporary), "w", format="mp4", options=container) as file,
    ):
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


def spread_frames(path: Path, count: int) -> list[NDArray[np.uint8]]:
    """Return `count` frames of a clip that `write_mp4` wrote, spread evenly from first to last.

    If the clip has fewer frames, all are returned.

    Raises:
        StorageError: the clip cannot be read.
    """
    import av

    try:
        with av.open(str(path)) as file:
            frames = list(file.decode(video=0))
            last, count = len(frames) - 1, min(count, len(frames))
            places = [round(last * number / max(1, count - 1)) for number in range(count)]
            arrays: list[Any] = [frames[place].to_ndarray(format="rgb24") for place in places]
            return arrays
    except (av.FFmpegError, IndexError) as error:
        hint = "delete it and run the same command again, which draws it anew"
        raise StorageError(f"this clip cannot be read ({error})", where=path, hint=hint) from None
