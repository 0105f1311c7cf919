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
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.files.media import probe_video
from latentmake.reports.page import ClipSources

_WIDTH, _NARROW = 1024, 512  # pixels; wider pictures are scaled down
_MANY = 200  # pictures; more are narrow
_PIXEL_ART = 256  # pixels; smaller pictures are embedded without loss
Picture = tuple[str, int, int, bool]
_READING = Dataset(path=".")  # as an image of a dataset with the default settings


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

    def __init__(self, count: int, sources: ClipSources) -> None:
        self._sources = sources
        self.clips: list[int] = []
        self._width = _WIDTH if count <= _MANY else _NARROW
        self._numbers: dict[str, int] = {}
        self.embedded: list[Picture] = []
        self.faults: list[str] = []

    def add(self, path: Path) -> int | str:
        """Return the number of a picture, or why it cannot be shown."""
        try:
            data = path.read_bytes()
            if (name := digest.of_bytes(data)) not in self._numbers:
                number, is_clip = len(self.embedded), path in self._sources
                self.embedded.append(self._clip(path) if is_clip else self._image(data, path))
                self.clips += [number] * is_clip
                self._numbers[name] = number
            return self._numbers[name]
        except SourceError as error:
            fault = error.what
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        self.faults.append(f"{path}: {fault}")
        return as_text(fault)

    def _clip(self, path: Path) -> Picture:
        media = probe_video(str(path))
        small = max(media.width, media.height) < _PIXEL_ART
        return self._sources.address(path), media.width, media.height, small

    def _image(self, data: bytes, path: Path) -> Picture:
        image = decode(data, str(path), _READING)
        if max(image.size) < _PIXEL_ART:
            return embedded(image, "png", optimize=True), *image.size, True
        image.thumbnail((self._width, 2 * self._width), Image.Resampling.LANCZOS)
        return embedded(image, "webp", quality=80, method=2), *image.size, False
