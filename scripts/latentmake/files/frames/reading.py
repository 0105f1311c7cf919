"""Reading frames of a video by their index, exactly those of a full sequential decode.

It decodes from the beginning and jumps ahead where the index of a file tells a place to begin anew
that saves decoding. What does not agree with the index afterwards is decoded from the beginning.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from latentmake.errors import SourceError
from latentmake.files.frames import npz
from latentmake.files.frames.ended import EndedError
from latentmake.files.frames.index import Entry, FrameIndex, read_index
from latentmake.files.media import NPZ, opened_video

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

PATIENCE = 48
"""Frames that are rather decoded than looked up in an index, which takes a reading of the file."""

_SPARED = 8  # frames that a jump must spare
_REMEMBERED = 8  # indices of files
_indices: OrderedDict[tuple[str, int, int, int], FrameIndex | None] = OrderedDict()


class _LostError(SourceError):
    """Frames after a jump are damaged, or not those of the index."""


def damaged(what: str, path: str) -> SourceError:
    """Return the error for a damaged video."""
    return SourceError(what, where=path, hint="convert it again, replace or remove it")


def read_frames(
    path: str,
    wanted: Sequence[int],
    tick: Callable[[], object] = bool,
    *,
    patience: int = PATIENCE,
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (index, RGB [H, W, 3]) of some frames of a video or npz clip.

    Args:
        path: the file.
        wanted: indices of frames in the order of display, ascending, none twice.
        tick: called for each frame decoded, and now and then while packets are read.
        patience: frames decoded in vain before an index is made.

    Raises:
        SourceError: it cannot be read, is no video, or is damaged before the last of them.
        EndedError: it has fewer frames.
    """
    with open_source(path) as file:
        if path.lower().endswith(NPZ):
            yield from npz.read_frames(file, path, wanted, tick)
            return
        pending = deque(wanted)
        try:
            for index, frame in _jumping(file, path, wanted, tick, patience):
                yield index, _rgb(frame)
                pending.popleft()
            return
        except _LostError:
            tick()  # the whole decides
        file.seek(0)
        for index, frame in _jumping(file, path, [*pending], tick, None):
            yield index, _rgb(frame)


@contextmanager
def open_source(path: str) -> Iterator[BinaryIO]:
    """Open a file; an OSError becomes a SourceError."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        hint = "check that the file exists and is readable"
        raise SourceError(what, where=path, hint=hint) from None
    with file:
        yield file


def _rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    """Return a frame's pixels, those of its `to_image`."""
    plane = frame.reformat(format="rgb24").planes[0]
    buffer: Any = plane
    rows: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8).reshape(-1, abs(plane.line_size))
    rows = rows[: frame.height, : 3 * frame.width]
    if plane.line_size < 0:
        rows = rows[::-1]
    return np.ascontiguousarray(rows).reshape(frame.height, frame.width, 3)


def _jumping(
    file: BinaryIO,
    path: str,
    wanted: Sequence[int],
    tick: Callable[[], object],
    patience: int | None,
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield frames; without `patience` all are decoded up to the last one wanted."""
    position = -1
    frame: Any = None  # the last one decoded
    index: FrameIndex | None = None
    asked, jumped = -1, False
    with opened_video(file, path) as (container, stream):
        frames: Iterator[Any] = container.decode(stream)  # half typed
        for target in wanted:
            while position < target:
                if (
                    patience is not None
                    and frame is not None
                    and asked != target
                    and target - position > patience
                ):
                    asked, patience = target, min(patience, _SPARED)
                    index = index or _index_of(path, file, tick)
                    if index is None or not _agrees(index, position, frame):
                        patience = None
                        continue
                    if target >= len(index.times):
                        raise EndedError(path, len(index.times), target)
                    entry = index.entry_for(target)
                    if entry.frame - position > patience:
                        frames, jumped = _frames_from(container, stream, entry, tick), True
                        position = entry.frame - 1
                frame = _next(frames, jumped)
                tick()
                if frame is None and not jumped:
                    raise EndedError(path, position + 1, target)
                position += 1
                if jumped and not (index and frame and _agrees(index, position, frame)):
                    if not (frame and frame.is_corrupt):
                        _remember(_identity(path, file), None)
                    raise _LostError("is unlike its index", where=path)
                if frame.is_corrupt:  # FFmpeg goes on with guesses
                    raise damaged(f"is damaged at frame {position}", path)
            yield target, frame


def _next(frames: Iterator[Any], jumped: bool) -> Any:
    try:
        return next(frames, None)
    except Exception:
        if jumped:
            raise _LostError("cannot be decoded from here") from None
        raise


def _agrees(index: FrameIndex, position: int, frame: VideoFrame) -> bool:
    """Whether a frame is that of the index; each field of an interlaced one may have a packet."""
    is_whole = not (frame.interlaced_frame or frame.is_corrupt)
    return is_whole and position < len(index.times) and frame.pts == index.times[position]


def _frames_from(
    container: InputContainer, stream: VideoStream, entry: Entry, tick: Callable[[], object]
) -> Iterator[VideoFrame]:
    """Yield the frames from an entry on."""
    for time in (entry.pts, entry.dts):  # which of them a demuxer takes it for, it alone knows
        container.seek(time, stream=stream)
        packets = container.demux(stream)
        packet = next(packets)
        if packet.pts is not None and packet.pts <= entry.pts:
            break
    while packet.pts != entry.pts:
        if packet.pts is None or packet.pts > entry.pts:
            return
        tick()
        packet = next(packets)
    for each in chain([packet], packets):
        for frame in each.decode():
            if frame.pts is None or frame.pts >= entry.pts:  # not those that an entry leads with
                yield frame


def _index_of(path: str, file: BinaryIO, tick: Callable[[], object]) -> FrameIndex | None:
    """Return a file's index, remembered by its stat."""
    key = _identity(path, file)
    if key not in _indices:
        try:
            with open_source(path) as again, opened_video(again, path) as (container, stream):
                _remember(key, read_index(container, stream, tick))
        except SourceError:
            _remember(key, None)
    return _indices[key]


def _identity(path: str, file: BinaryIO) -> tuple[str, int, int, int]:
    stat = os.fstat(file.fileno())
    return path, stat.st_size, stat.st_mtime_ns, stat.st_ino


def _remember(key: tuple[str, int, int, int], index: FrameIndex | None) -> None:
    _indices[key] = index
    if len(_indices) > _REMEMBERED:
        _indices.popitem(last=False)
