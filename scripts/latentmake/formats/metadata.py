"""Metadata of images. Pillow is made to ignore damaged metadata, as image viewers do.

Unpatched, Pillow refuses a sound picture if its EXIF, ICC profile, XMP or texts are damaged.
Readable metadata still count, so a picture keeps its pixels and its orientation.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

# An item's entry and its type, which tells AVIF decoders that the item is EXIF.
_EXIF_OF_AVIF = re.compile(rb"(infe.{8}(?:..)?)Exif", re.DOTALL)
# Tags of a TIFF that affect its pixels: baseline tags, and tags of JPEG compression.
_PIXELS = {*range(254, 269), *range(273, 305), *range(317, 700)}


def orientation(image: Image, *, decodes: bool = True) -> int:
    """Return the EXIF orientation of an image, 1 to 8; 1 if it cannot be read.

    With `decodes`, a PNG without EXIF before its pixels is decoded to find EXIF after them.
    """
    from PIL import ExifTags
    from PIL.Image import Image as Plain

    exif = image.getexif() if decodes else Plain.getexif(image)
    with suppress(Exception):  # a parser may raise anything
        value = exif.get(ExifTags.Base.Orientation, 1)
        if value in range(1, 9):
            return int(value)
    return 1


@cache
def pass_over_damaged() -> None:
    """Make Pillow ignore damaged metadata in this process. Call this before opening an image."""
    from PIL import (
        AvifImagePlugin,
        Image,
        ImageFile,
        JpegImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
    )

    def chunk(stream: Any, kind: bytes, place: int, length: int) -> bytes:
        if _matters(kind) or not hasattr(stream, f"chunk_{kind.decode()}"):
            raise  # again the exception that `_passing` has caught
        stream.fp.seek(place)
        return ImageFile._safe_read(stream.fp, length)

    def checksum(_stream: Any, kind: bytes, _data: bytes) -> None:
        if _matters(kind):
            raise

    def segment(image: JpegImagePlugin.JpegImageFile, marker: int) -> None:
        with suppress(IndexError, struct.error):
            JpegImagePlugin.APP(image, marker)
        image.icclist = [part for part in image.icclist if len(part) > 13]  # byte 13 is its number
        image.info.pop("mp", None)  # ignore the index of further pictures (MPO)

    _passing(Image.Image, "getexif", lambda image: image._exif)
    _passing(Image.Exif, "load", lambda *_: None)
    _passing(Image.Exif, "load_from_fp", lambda *_: None)
    _passing(Image.Exif, "get_ifd", lambda *_: {})
    _passing(Image.Exif, "tobytes", lambda *_: b"")
    _passing(PngImagePlugin.PngStream, "call", chunk)
    _passing(PngImagePlugin.PngStream, "crc", checksum)
    segments: dict[int, Any] = JpegImagePlugin.MARKER
    segments.update({marker: (*segments[marker][:2], segment) for marker in range(0xFFE0, 0xFFF0)})
    _bare(AvifImagePlugin.AvifImageFile, lambda data: _EXIF_OF_AVIF.sub(rb"\1skip", data))
    _bare(TiffImagePlugin.TiffImageFile, _without_tags)


def _matters(kind: bytes) -> bool:
    """Whether the pixels of a PNG depend on a kind of chunk."""
    return kind[:1].isupper() or kind == b"fdAT"


def _without_tags(data: bytes) -> bytes:
    """Return a TIFF whose tags of metadata have an unknown type, so that readers skip them.

    This changes only the first directory.
    """
    changed, order = bytearray(data), "<" if data.startswith(b"II") else ">"
    (place,) = struct.unpack_from(f"{order}L", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, place)
    for entry in range(place + 2, place + 2 + 12 * count, 12):
        if struct.unpack_from(f"{order}H", data, entry)[0] not in _PIXELS:
            changed[entry + 2 : entry + 4] = b"\0\0"
    return bytes(changed)


def _bare(owner: Any, without: Callable[[bytes], bytes]) -> None:
    """If a class of images cannot open a file, let it try again without the metadata."""
    opened = owner._open

    def again(image: Any) -> None:
        image.fp.seek(0)
        image.fp = io.BytesIO(without(image.fp.read()))
        opened(image)

    _passing(owner, "_open", again)


def _passing(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method of a class: if it raises an exception, `instead` is called."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        except Exception:
            return instead(*arguments, **named)

    setattr(owner, name, method)
