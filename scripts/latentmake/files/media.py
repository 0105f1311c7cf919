"""Probe images and videos: size and length, without decoding more than it takes.

Planning does so once for each file that it has not seen before; Pillow and PyAV are imported only
then. Whoever decodes files opens them here too, so that faults are named alike.
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
from typing import TYPE_CHECKING, BinaryIO

from latentmake.errors import SourceError, unreadable
from latentmake.files.metadata import orientation, pass_over_damaged
from latentmake.geometry.buckets import Size, refuse_large
from latentmake.geometry.clips import Media, Timing
from latentmake.regular import open_regular

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL import Image

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Pillow's names of the formats of the endings that a dataset takes.

No other format is tried, whatever a file is called: Pillow would start Ghostscript for PostScript.
"""

RENAMED = {".jfif": ".jpg", ".jpe": ".jpg", ".jif": ".jpg", ".mpo": ".jpg", ".apng": ".png"}
"""Endings of images that could be read, but that neither a dataset nor the trainers take."""

UNREAD_IMAGES = frozenset(
    (
        *(".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".tga", ".ico"),
        *(".icns", ".psd", ".xcf", ".svg", ".exr", ".hdr", ".dds", ".dib", ".pcx", ".ppm", ".pgm"),
        *(".pbm", ".pnm", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
    )
)
"""Endings of images that cannot be read: Pillow alone does not, nor do the trainers."""

UNREAD_VIDEOS = frozenset(
    (
        *(".ts", ".mts", ".m2ts", ".m2v", ".3gp", ".3g2", ".ogv", ".vob", ".asf", ".f4v", ".mxf"),
        *(".rm", ".rmvb", ".divx", ".qt"),
    )
)
"""Endings of videos that neither a dataset nor musubi-tuner takes."""

_NAMES = {".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC", ".jxl": "JPEG XL"}

_UNREAD = {
    "HEIC": re.compile(rb"....ftyp(he[iv].|m[is]f1)", re.DOTALL),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
}

VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"}
)

NPZ = ".npz"
"""Ending of a clip whose frames are an array."""

# In these a packet of these is one picture, neither more nor less, as a rule. Not so elsewhere:
# MPEG-4 in AVI may hold packets without a picture, VP8 pictures that nobody shows.
_COUNTED_CONTAINERS = frozenset({"mov", "matroska"})
_COUNTED_CODECS = frozenset({"h264", "hevc", "vp9", "av1", "libdav1d", "mjpeg", "ffv1", "prores"})


# Ends of complete files, which other bytes may follow; Pillow opens no WebP that is cut short.
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND", "WEBP": b""}
_TAIL = 64  # bytes

_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may hold EXIF

_CONVERT = "convert it, for example to MP4 with H.264, or remove it"


@contextmanager
def opened_image(file: BinaryIO, path: str, max_pixels: int | None) -> Iterator[Image.Image]:
    """Open an image, of which nothing but the header is decoded yet.

    Raises:
        SourceError: it is empty, no image, or has more pixels than allowed; or decoding it inside
            of the `with` failed, in whatever way.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # our own limit is checked before any pixel is decoded
    pass_over_damaged()
    _refuse_empty(file, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata that no pixel depends on
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
    except Exception as error:  # a decoder may raise anything at all for a damaged file
        what = f"is damaged or cut short ({error})"
        raise SourceError(what, where=path, hint="replace or remove it") from None


def unread_format(kind: str) -> tuple[str, str]:
    """Return the fault of an image of a format that is not read, and the hint."""
    return f"is a {kind} image, which cannot be read", "convert it to PNG or JPEG, or remove it"


def unread_fault(ending: str) -> tuple[str, str] | None:
    """Return the fault that a file has by its ending, and the hint; None where it has none."""
    if ending in _NAMES:
        return unread_format(_NAMES[ending])
    if ending in RENAMED:
        hint = f"rename it to {RENAMED[ending]}"
    elif ending in UNREAD_IMAGES:
        hint = "convert it to PNG or JPEG, or remove it"
    elif ending in UNREAD_VIDEOS:
        hint = "convert it to MP4, or remove it"
    else:
        return None
    return f"has the ending {ending}, which is not read", hint


def load(image: Image.Image, path: str) -> None:
    """Decode an image that `opened_image` has opened.

    Raises:
        SourceError: its values are fractions from 0 to 1, which would all become black.
    """
    image.load()
    most = image.getextrema()[1] if image.mode == "F" else None
    if isinstance(most, float) and most <= 1:
        what = "holds floating-point values from 0 to 1, which would become black"
        raise SourceError(what, where=path, hint="save it with 8 or 16 bits a channel")


def upright_size(data: bytes, path: str, max_pixels: int, *, turns: bool) -> Size:
    """Return an image's size from its header, where it `turns` as shown; raises SourceError."""
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        if not turns or image.format == "TIFF":  # Pillow turns a TIFF itself
            return Size(*image.size)
        # Pillow decodes a PNG for EXIF behind its pixels; not here, where no such chunk follows.
        behind = data.find(b"IDAT") if image.format == "PNG" else 0
        decodes = image.format != "PNG" or any(data.find(x, behind) >= 0 for x in _PNG_TEXTS)
        turned = orientation(image, decodes=decodes) >= 5
        return Size(*(image.size[::-1] if turned else image.size))


def check_image(data: bytes, path: str, max_pixels: int) -> tuple[tuple[int, int], str]:
    """Check header and end of an image that another program decodes; raises SourceError.

    It is decoded only where its end is not that of its format.

    Returns:
        Its size in pixels, as stored, and Pillow's mode.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        end = _ENDS.get(image.format or "")
        if end is None or end not in data[-_TAIL:]:
            load(image, path)
        return image.size, image.mode


@contextmanager
def opened_video(path: str) -> Iterator[tuple[InputContainer, VideoStream, VideoFile]]:
    """Open a video: its container, the first of its video streams, and the file that is read.

    Raises:
        SourceError: it cannot be read, is empty, no video, or holds no picture; or decoding it
            inside of the `with` failed, in whatever way.
    """
    import av

    with opened(path) as plain, VideoFile(plain.fileno(), closefd=False) as file:
        _refuse_empty(file, path)
        what, hint = "is not a video that FFmpeg can read, or is cut short", _CONVERT
        try:
            # A playlist that calls itself a video leads to no other file, nor to the network.
            with av.open(file, "r", container_options={"protocol_whitelist": "none"}) as container:
                what, hint = "is damaged or cut short", "convert it, replace or remove it"
                if not container.streams.video:
                    raise SourceError("holds no video stream", where=path, hint="remove it")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    codec = "is coded in a way that this FFmpeg cannot decode, or is cut short"
                    raise SourceError(codec, where=path, hint=_CONVERT)
                # Files are read side by side: FFmpeg's threads could only wait for each other.
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
    """Open a source; an OSError becomes a SourceError, also one inside of the `with`."""
    try:
        raw, _ = open_regular(path)
        with io.BufferedReader(raw) as file:
            yield file
    except OSError as error:
        raise unreadable(error, path) from None


def probe_image(path: str) -> Media:
    """Return an image's size, from its header; a SourceError says why it cannot be read."""
    with opened(path) as file, opened_image(file, path, None) as image:
        return Media(image.width, image.height, 0)


def probe_video(path: str) -> Media:
    """Return the size of a video's first decoded frame, and number, timing and rotation of all.

    Frames are counted as packets where a packet is a frame for certain, and decoded otherwise.
    """
    for count in (_count_packets, _count_frames):
        with opened_video(path) as (container, stream, file):
            first, times = count(container, stream, file)
            if first is not None:
                return _media(first, times, stream)
    raise SourceError("holds no frame", where=path, hint="replace or remove it")


_Times = list[tuple[int | None, int]]
"""Timestamps and durations of frames, in any order; 0 is a duration that is not known."""


def _media(first: VideoFrame, times: _Times, stream: VideoStream) -> Media:
    """Return what is known of the frames of a stream, of which `first` is the first."""
    timing, base = "", first.time_base or stream.time_base
    known = sorted(time for time, _ in times if time is not None)
    if base and len(known) == len(times):
        last = max(times)[1]
        if len(known) > 1 and last < (known[-1] - known[-2]) / 2:  # not known, or a stand-in
            last = known[-1] - known[-2]
        if last <= 0:
            last = max(1, round(1 / (base * (stream.average_rate or 16))))
        timing = Timing.of(base, known, last).simplified().text
    rotation = round(-first.rotation / 90) * 90 % 360  # Media's is clockwise, PyAV's is not
    return Media(first.width, first.height, len(times), timing, rotation)


class VideoFile(io.FileIO):
    """A file that gives FFmpeg zeros for the media data of an MP4 or MOV file, once told to.

    The index of such a file holds sizes, timestamps and flags of all packets. PyAV's
    `index_entries` lack the timestamps of display, so packets are demuxed as ever, but not read.
    """

    _skipped: tuple[tuple[int, int], ...] = ()  # begin and end of media data, ascending

    def skip(self) -> None:
        """Give zeros from now on; fragments between media data are still read."""
        here, end, place = self.tell(), self.seek(0, os.SEEK_END), 0
        found: list[tuple[int, int]] = []
        while place < end:
            self.seek(place)
            size, kind, long = struct.unpack(">I4sQ", self.read(16).ljust(16, b"\0"))
            begin = place + (16 if size == 1 else 8)
            place = min(end, place + (long if size == 1 else size)) if size else end
            if place < begin:  # damaged
                break
            if kind == b"mdat":
                found.append((begin, place))
        self._skipped = tuple(found)
        self.seek(here)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return some bytes, or fewer."""
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
    """Yield the packets of a stream with their timestamps, each of which is sure to be a frame.

    Raises:
        SourceError: one may be none, or a frame that is not shown; it names no place.
    """
    first: Packet[VideoStream] | None = None
    kind, codec = container.format.name.partition(",")[0], stream.codec_context.name
    if codec not in _COUNTED_CODECS or kind not in _COUNTED_CONTAINERS:
        raise SourceError("may hold packets that are no frames")
    for packet in container.demux(stream):
        if packet.size == 0 and packet.dts is None:  # PyAV's sign that the file is at its end
            continue
        first, pts = first or packet, packet.pts
        if (
            not packet.size
            or not first.is_keyframe
            or packet.is_corrupt  # the end of a file that was cut short
            or packet.is_discard  # before the beginning that an edit list sets
            # Shown before the first key frame: it refers to frames that are not there.
            or pts is None
            or first.pts is None
            or pts < first.pts
        ):
            raise SourceError("holds packets that are no frames")
        yield packet, pts


def _count_packets(
    container: InputContainer, stream: VideoStream, file: VideoFile
) -> tuple[VideoFrame | None, _Times]:
    """Return the first frame and the times of all; no frame where packets may not be frames."""
    frame: VideoFrame | None = None
    times: _Times = []
    with suppress(SourceError):
        for packet, pts in frame_packets(container, stream):
            times.append((pts, packet.duration or 0))
            if frame is None:
                frame = next(iter(packet.decode()), None)
                if frame is not None and container.format.name.startswith("mov"):
                    file.skip()
        # Each of the two fields of an interlaced frame may have its own packet.
        return (None if frame is None or frame.interlaced_frame else frame), times
    return None, times


def _count_frames(
    container: InputContainer, _stream: VideoStream, _file: VideoFile
) -> tuple[VideoFrame | None, _Times]:
    """Return the first frame and the times of all, which are decoded."""
    first, times = None, []
    for frame in container.decode(video=0):
        first = first or frame
        times.append((frame.pts, frame.duration or 0))
    return first, times
