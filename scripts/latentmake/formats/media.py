"""Probing of images and videos: size and length, with as little decoding as possible.

Planning probes a file once, when it first sees it. Pillow and PyAV are imported only then. Code
that decodes files opens them with these functions, too, so messages about faults are the same.
"""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from latentmake.base.errors import SourceError, unreadable
from latentmake.base.regular import open_regular
from latentmake.formats.endings import IMAGE_FORMATS, unread_format
from latentmake.formats.metadata import orientation, pass_over_damaged
from latentmake.geometry.buckets import Size, refuse_large
from latentmake.geometry.clips import Media, Timing

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL import Image

_UNREAD = {
    "HEIC": re.compile(rb"....ftyp(he[iv].|m[is]f1)", re.DOTALL),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
}

# With these codecs in these containers, a packet is usually exactly one picture. Others differ:
# MPEG-4 in AVI may have packets without a picture, and VP8 has pictures that are not shown.
_COUNTED_CONTAINERS = frozenset({"mov", "matroska"})
_COUNTED_CODECS = frozenset({"h264", "hevc", "vp9", "av1", "libdav1d", "mjpeg", "ffv1", "prores"})


# Last bytes of complete files; some other bytes may follow. For WebP there is nothing to check:
# Pillow does not open a WebP that is cut short.
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND", "WEBP": b""}
_TAIL = 64  # bytes in which the end must occur

_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may contain EXIF

_CONVERT = "convert it, for example to MP4 with H.264, or remove it"


@contextmanager
def opened_image(file: BinaryIO, path: str, max_pixels: int | None) -> Iterator[Image.Image]:
    """Open an image and decode only its header.

    Raises:
        SourceError: the file is empty, no image, or has more than `max_pixels`; or decoding it
            inside the `with` raised any exception.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # our own limit is checked before any pixel is decoded
    pass_over_damaged()
    _refuse_empty(file, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about metadata, not about pixels
            image = Image.open(file, formats=IMAGE_FORMATS)
            if max_pixels is not None:
                refuse_large(Size(*image.size), max_pixels, path)
            yield image
    except SourceError:
        raise
    except UnidentifiedImageError:
        file.seek(0)
        what = "is not an image that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF)"
        hint = "save it again as PNG or JPEG, or remove it"
        begin = file.read(12)
        for kind, pattern in _UNREAD.items():
            if pattern.match(begin):
                what, hint = unread_format(kind)
        raise SourceError(what, where=path, hint=hint) from None
    except Exception as error:  # for a damaged file, a decoder may raise anything
        what = f"is damaged or cut short ({error})"
        raise SourceError(what, where=path, hint="replace or remove it") from None


def load(image: Image.Image, path: str) -> None:
    """Decode an image that `opened_image` has opened.

    Raises:
        SourceError: the values are fractions from 0 to 1, which would become black.
    """
    image.load()
    most = image.getextrema()[1] if image.mode == "F" else None
    if isinstance(most, float) and most <= 1:
        what = "holds floating-point values from 0 to 1, which would become black"
        raise SourceError(what, where=path, hint="save it with 8 or 16 bits a channel")


def upright_size(data: bytes, path: str, max_pixels: int, *, turns: bool) -> Size:
    """Return an image's size from its header; raises SourceError.

    With `turns`, this is the size after the rotation by its EXIF orientation.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        if not turns or image.format == "TIFF":  # Pillow rotates a TIFF itself
            return Size(*image.size)
        # To find EXIF behind the pixels of a PNG, Pillow decodes it. This is skipped if no chunk
        # there can contain EXIF.
        behind = data.find(b"IDAT") if image.format == "PNG" else 0
        decodes = image.format != "PNG" or any(data.find(kind, behind) >= 0 for kind in _PNG_TEXTS)
        turned = orientation(image, decodes=decodes) >= 5
        return Size(*(image.size[::-1] if turned else image.size))


def check_image(data: bytes, path: str, max_pixels: int) -> tuple[tuple[int, int], str]:
    """Check header and end of an image that another program decodes; raises SourceError.

    The image is decoded only if the end of its format is missing.

    Returns:
        The size in pixels, as stored, and Pillow's mode.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        end = _ENDS.get(image.format or "")
        if end is None or end not in data[-_TAIL:]:
            load(image, path)
        return image.size, image.mode


@contextmanager
def opened_video(path: str) -> Iterator[tuple[InputContainer, VideoStream, VideoFile]]:
    """Open a video, and yield its container, its first video stream, and the file that is read.

    Raises:
        SourceError: the file cannot be read, is empty, no video, or has no video stream; or
            decoding it inside the `with` raised any exception.
    """
    import av

    with opened(path) as plain, VideoFile(plain.fileno(), closefd=False) as file:
        _refuse_empty(file, path)
        what, hint = "is not a video that FFmpeg can read, or is cut short", _CONVERT
        try:
            # A playlist with the ending of a video must not open other files or the network.
            with av.open(file, "r", container_options={"protocol_whitelist": "none"}) as container:
                what, hint = "is damaged or cut short", "convert it, replace or remove it"
                if not container.streams.video:
                    raise SourceError("holds no video stream", where=path, hint="remove it")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    codec = "is coded in a way that this FFmpeg cannot decode, or is cut short"
                    raise SourceError(codec, where=path, hint=_CONVERT)
                # Several files are read in parallel, so FFmpeg's threads would compete for cores.
                stream.codec_context.thread_count = 1
                yield container, stream, file
        except SourceError:
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise SourceError(f"{what} ({reason})", where=path, hint=hint) from None


def _refuse_empty(file: BinaryIO, path: str) -> None:
    if not file.read(1):
        raise SourceError("is an empty file", where=path, hint="replace or remove it")
    file.seek(0)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open a source; an OSError becomes a SourceError, also inside the `with`."""
    try:
        raw, _ = open_regular(path)
        with io.BufferedReader(raw) as file:
            yield file
    except OSError as error:
        raise unreadable(error, path) from None


def drawn_picture(file: Path | BinaryIO) -> Image.Image | None:
    """Return a picture that a program drew; None if it is missing, damaged or cut short."""
    with suppress(SourceError):
        if isinstance(file, Path):
            with opened(str(file)) as source:
                return drawn_picture(source)
        with opened_image(file, "", None) as image:
            return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return None


def probe_image(path: str) -> Media:
    """Return an image's size from its header; raises SourceError."""
    with opened(path) as file, opened_image(file, path, None) as image:
        return Media(image.width, image.height, 0)


def probe_video(path: str) -> Media:
    """Return the size, length, timing and rotation of a video; raises SourceError.

    The size is that of the first decoded frame. If each packet is surely one frame, packets are
    counted; otherwise all frames are decoded.
    """
    with opened_video(path) as (container, stream, file):
        first, times = _count_packets(container, stream, file)
        if first is not None:
            return _media(first, times, stream)
    times = []
    with opened_video(path) as (container, stream, _):
        for frame in container.decode(video=0):
            first = first or frame
            times.append((frame.pts, frame.duration or 0))
        if first is not None:
            return _media(first, times, stream)
    raise SourceError("holds no frame", where=path, hint="replace or remove it")


_Times = list[tuple[int | None, int]]
"""Timestamps and durations of frames, in any order; a duration of 0 is unknown."""


def _media(first: VideoFrame, times: _Times, stream: VideoStream) -> Media:
    """Return the facts about a stream, from its first frame and the times of all frames."""
    timing, base = "", first.time_base or stream.time_base
    stamps = sorted(time for time, _ in times if time is not None)
    if base and len(stamps) == len(times):
        last = max(times)[1]
        # A very short duration of the last frame is unknown (0) or a placeholder.
        if len(stamps) > 1 and last < (stamps[-1] - stamps[-2]) / 2:
            last = stamps[-1] - stamps[-2]
        if last <= 0:
            last = max(1, round(1 / (base * (stream.average_rate or 16))))
        timing = Timing.of(base, stamps, last).simplified().text
    # `Media` counts clockwise, PyAV counter-clockwise.
    rotation = round(-first.rotation / 90) * 90 % 360
    return Media(first.width, first.height, len(times), timing, rotation)


class VideoFile(io.FileIO):
    """File that, after `skip`, returns zeros instead of the media data of an MP4 or MOV.

    The index of such a file has the sizes, timestamps and flags of all packets. PyAV's
    `index_entries` lack presentation timestamps. So packets are demuxed as usual, but their data
    are not read from the disk.
    """

    _skipped: tuple[tuple[int, int], ...] = ()  # start and end of each `mdat` box, ascending

    def skip(self) -> None:
        """Return zeros for media data from now on. Boxes between media data are still read."""
        here, end, place = self.tell(), self.seek(0, os.SEEK_END), 0
        skipped: list[tuple[int, int]] = []
        while place < end:
            self.seek(place)
            size, kind, long = struct.unpack(">I4sQ", self.read(16).ljust(16, b"\0"))
            begin = place + (16 if size == 1 else 8)
            place = min(end, place + (long if size == 1 else size)) if size else end
            if place < begin:  # the file is damaged
                break
            if kind == b"mdat":
                skipped.append((begin, place))
        self._skipped = tuple(skipped)
        self.seek(here)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes."""
        here = self.tell()
        number = bisect_right(self._skipped, here, key=itemgetter(0)) - 1
        if not size or number < 0 or here >= (end := self._skipped[number][1]):
            return super().read(size)
        size = min(size, end - here)
        self.seek(here + size)
        return bytes(size)


def frame_packets(
    container: InputContainer, stream: VideoStream
) -> Iterator[tuple[Packet[VideoStream], int]]:
    """Yield the packets of a stream with their timestamps, as long as each is surely one frame.

    Raises:
        SourceError: a packet may be no frame, or a frame that is not shown. The error names no
            file.
    """
    first: Packet[VideoStream] | None = None
    kind, codec = container.format.name.partition(",")[0], stream.codec_context.name
    if codec not in _COUNTED_CODECS or kind not in _COUNTED_CONTAINERS:
        raise SourceError("may hold packets that are no frames")
    for packet in container.demux(stream):
        if packet.size == 0 and packet.dts is None:  # PyAV marks the end of the file like this
            continue
        first, pts = first or packet, packet.pts
        if (
            not packet.size
            or not first.is_keyframe
            or packet.is_corrupt  # the end of a file that was cut short
            or packet.is_discard  # it lies before the start that an edit list sets
            # It is shown before the first key frame, so it refers to frames that are missing.
            or pts is None
            or first.pts is None
            or pts < first.pts
        ):
            raise SourceError("holds packets that are no frames")
        yield packet, pts


def _count_packets(
    container: InputContainer, stream: VideoStream, file: VideoFile
) -> tuple[VideoFrame | None, _Times]:
    """Return the first frame and the times of all; None as frame if packets may not be frames."""
    frame: VideoFrame | None = None
    times: _Times = []
    with suppress(SourceError):
        for packet, pts in frame_packets(container, stream):
            times.append((pts, packet.duration or 0))
            if frame is None:
                frame = next(iter(packet.decode()), None)
                if frame is not None and container.format.name.startswith("mov"):
                    file.skip()
        # The two fields of an interlaced frame may have separate packets.
        return (None if frame is None or frame.interlaced_frame else frame), times
    return None, times
