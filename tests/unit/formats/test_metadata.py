"""Damaged metadata refuse no sound picture, of any format, for any layout."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.encode.pixels.plain import decode
from latentmake.encode.pixels.stored import open_image
from latentmake.formats.media import check_image, upright_size
from PIL import Image

SIZE = (40, 24)
PICTURE = Image.linear_gradient("L").resize(SIZE).convert("RGB")
MOST = 10_000
EXIF = Image.Exif()
EXIF.get_ifd(0x8769)[0x9003] = "2024:05:17 00:00:00"
EXIF[0x010F] = "a maker"
JUNK = b"not a TIFF file"


def saved(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, kind, **options)
    return file.getvalue()


def png(kind: bytes, content: bytes, *, behind: bool = False, wrong: int = 0) -> bytes:
    """Return a PNG with one more chunk, before its pixels or behind."""
    data = saved("PNG")
    place = len(data) - 12 if behind else data.index(b"IDAT") - 4
    checksum = struct.pack(">I", zlib.crc32(kind + content) ^ wrong)
    chunk = struct.pack(">I", len(content)) + kind + content + checksum
    return data[:place] + chunk + data[place:]


def jpeg(marker: int, content: bytes) -> bytes:
    """Return a JPEG with one more segment, behind that of its density."""
    data = saved("JPEG", dpi=(72, 72))
    return data[:20] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[20:]


def tiff(tag: int, field: int, value: bytes) -> bytes:
    """Return a TIFF with other bytes in the entry of one tag, at one of its 12 bytes."""
    data = bytearray(saved("TIFF", description="d" * 20))
    (place,) = struct.unpack_from("<L", data, 4)
    place = data.index(struct.pack("<H", tag), place) + field
    data[place : place + len(value)] = value
    return bytes(data)


def avif(place: int) -> bytes:
    """Return an AVIF with another byte in its EXIF."""
    data = bytearray(saved("AVIF", exif=EXIF))
    data[data.index(b"MM\0*") + place] ^= 0xFF
    return bytes(data)


RAW = b"\nexif\n   8\n4a756e6b4a756e6b\n"
LARGE = zlib.compress(bytes(2_000_000))
DAMAGED: dict[str, Callable[[], bytes]] = {
    "EXIF of a PNG": lambda: png(b"eXIf", JUNK),
    "EXIF behind the pixels of a PNG": lambda: png(b"eXIf", JUNK, behind=True),
    "EXIF of ImageMagick": lambda: png(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW)),
    "a large text": lambda: png(b"iTXt", b"workflow\0\1\0\0\0" + LARGE),
    "a large text behind the pixels": lambda: png(b"zTXt", b"workflow\0\0" + LARGE, behind=True),
    "a compression that nobody knows": lambda: png(b"zTXt", b"words\0\7abc"),
    "a wrong checksum of a text": lambda: png(b"tEXt", b"words\0abc", wrong=1),
    "a wrong checksum of a private chunk": lambda: png(b"vpAg", b"abc", wrong=1),
    "an ICC profile of a PNG": lambda: png(b"iCCP", b"sRGB\0\7" + JUNK),
    "half a resolution": lambda: png(b"pHYs", b"\0"),
    "half an animation": lambda: png(b"fcTL", b"\0", behind=True),
    "EXIF of a JPEG": lambda: jpeg(0xE1, b"Exif\0\0" + JUNK),
    "half an ICC profile of a JPEG": lambda: jpeg(0xE2, b"ICC_PROFILE\0"),
    "half a density of a JPEG": lambda: jpeg(0xE0, b"JFIF\0"),
    "Photoshop's half resource": lambda: jpeg(0xED, b"Photoshop 3.0\x008BIM\3\xed"),
    "EXIF of a WebP": lambda: saved("WEBP", exif=JUNK),
    "EXIF of an AVIF": lambda: avif(0),
    "a description of a TIFF": lambda: tiff(270, 8, b"\xff\xff\xff\x7f"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_metadata_refuse_no_sound_picture(what: str) -> None:
    data = DAMAGED[what]()
    assert upright_size(data, "a", MOST, turns=True) == SIZE
    assert check_image(data, "a", MOST)[0] == SIZE
    for found in (decode(data, "a", Dataset(path="a")), open_image(data, "a", MOST)):
        difference = np.asarray(found, np.int16) - np.asarray(PICTURE, np.int16)
        assert np.abs(difference).mean() < 3


@pytest.mark.parametrize("place", [20, -40], ids=["header", "end"])
def test_damaged_pixels_beside_damaged_metadata_are_refused(place: int) -> None:
    data = bytearray(png(b"tEXt", b"words\0abc", wrong=1))
    data[place:] = data[place + 1 :]
    with pytest.raises(SourceError):
        decode(bytes(data), "a", Dataset(path="a"))
