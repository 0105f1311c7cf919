"""Images and clips of a page."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

from PIL import Image

from latentmake import digest
from latentmake.caches.pixels.plain import decode
from latentmake.config import Dataset
from latentmake.errors import SourceError
from latentmake.regular import read_regular
from latentmake.reports.clips import ClipSources

__all__ = ["Pictures", "as_text", "decoded", "embedded"]

_WIDTH, _HEIGHT = 1024, 2048  # pixels; larger pictures are scaled down
_PIXEL_ART = 256  # pixels; smaller pictures are embedded without loss
_PAGE = 14_000_000  # bytes of all pictures of a page; a third more as text
_LEAST, _MOST = 60_000, 400_000  # bytes of one picture, whatever their number
_QUALITIES = (90, 80, 70, 60, 50)
Picture = tuple[str, int, int, bool]
_READING = Dataset(path=".")  # as an image of a dataset with the default settings


def decoded(data: bytes, path: Path) -> Image.Image:
    """Return an image as RGB, upright.

    Raises:
        SourceError: it is damaged or no image.
    """
    return decode(data, str(path), _READING)


def embedded(image: Image.Image, kind: str, **options: Any) -> str:
    """Return an image as a data URI; `kind` is `png` or `webp`, `options` are Pillow's."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def as_text(name: str) -> str:
    """Return a file name with undecodable bytes replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


class Pictures:
    """Pictures of a page, without duplicates.

    Args:
        count: the expected number of images, which bounds the size of each.
        sources: addresses of clips.

    Attributes:
        embedded: address, width, height, whether to show it pixel by pixel.
        clips: numbers of those that are clips.
        faults: pictures that cannot be read, a line each.
    """

    def __init__(self, count: int, sources: ClipSources | None = None) -> None:
        self._sources = sources
        self.clips: list[int] = []
        self._limit = max(_LEAST, min(_MOST, _PAGE // max(1, count)))
        self._quality = 0  # index of the last picture's quality
        self._numbers: dict[str, int] = {}
        self.embedded: list[Picture] = []
        self.faults: list[str] = []

    def add(self, path: Path) -> int | str:
        """Return the number of a picture, or why it cannot be shown."""
        try:
            if self._sources is not None and path in self._sources:
                name, found = self._clip(path, self._sources)
            else:
                data = read_regular(path)
                name = digest.of_bytes(data)
                if name in self._numbers:
                    return self._numbers[name]
                found = self._embed(decoded(data, path))
            if name not in self._numbers:
                self._numbers[name] = len(self.embedded)
                self.embedded.append(found)
            return self._numbers[name]
        except SourceError as error:
            fault = error.what
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        self.faults.append(f"{path}: {fault}")
        return as_text(fault)

    def _clip(self, path: Path, sources: ClipSources) -> tuple[str, Picture]:
        """Return the name of a clip's content, and what shows it."""
        name = digest.of_file(path)
        if name in self._numbers:
            return name, self.embedded[self._numbers[name]]
        media = sources.media(path)
        self.clips.append(len(self.embedded))
        small = max(media.width, media.height) < _PIXEL_ART
        return name, (sources.address(path), media.width, media.height, small)

    def _embed(self, image: Image.Image) -> Picture:
        if max(image.size) < _PIXEL_ART:
            return embedded(image, "png", optimize=True), *image.size, True
        image.thumbnail((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)
        # Most pictures of a page need a similar quality: start one above the last picture's.
        self._quality = max(0, self._quality - 1)
        while True:
            uri = embedded(image, "webp", quality=_QUALITIES[self._quality], method=2)
            if len(uri) * 3 // 4 <= self._limit:
                break
            if self._quality < len(_QUALITIES) - 1:
                self._quality += 1
            elif max(image.size) >= 2 * _PIXEL_ART:
                size = (max(1, image.width * 3 // 4), max(1, image.height * 3 // 4))
                image = image.resize(size, Image.Resampling.LANCZOS)
            else:
                break
        return uri, *image.size, False
