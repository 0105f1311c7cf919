"""Contact sheet of a page: 100 thumbnails in one AVIF picture.

Measured with 10,000 photographs: 64 pixels a side take 270 to 440 bytes each in a sheet, and twice
that in a file of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from latentmake.caches.pixels.plain import decode, shrink_to, upright_size
from latentmake.config import Dataset
from latentmake.errors import SourceError
from latentmake.files.frames import frames_at
from latentmake.files.media import NPZ, VIDEO_EXTENSIONS
from latentmake.geometry.buckets import Size
from latentmake.reports.images import embedded
from latentmake.reports.items_order import Shown
from latentmake.sources import s3

__all__ = ["ACROSS", "ContactSheets", "Look", "Place", "look_at"]

ACROSS = 10  # thumbnails in a row of a sheet, and rows
_SIDES = ((300, 192), (1500, 128))  # most items -> pixels a side of a thumbnail
_LEAST = 64  # pixels a side, of any number of items
_BYTES, _MOST = 2_200_000, 6000  # of all thumbnails, and of one
_QUALITIES = (75, 60, 45, 30, 20, 10)

Place = tuple[int, int, int, int, int]
"""Sheet, and left, top, width and height of a thumbnail there, in pixels."""


class Look(NamedTuple):
    """One look at an item's picture.

    Attributes:
        size: of the image that its crop is counted in, in pixels.
        image: scaled down; None where the source cannot be shown.
        fault: why it cannot be shown, in a line.
    """

    size: Size | None
    image: Image.Image | None
    fault: str = ""


def look_at(item: Shown, settings: Dataset, side: int) -> Look:
    """Return an item's image, at most so many pixels a side; of a video one frame."""
    if s3.is_remote(item.image):
        return Look(None, None, "is on S3: it is not fetched for a report")
    path = Path(item.image)
    known = None if item.media is None else Size(item.media.width, item.media.height)
    try:
        if path.suffix.lower() in {*VIDEO_EXTENSIONS, NPZ}:
            ((_, frame),) = frames_at(item.image, [item.frame])
            turns = -(item.media.rotation if item.media else 0) // 90
            image = Image.fromarray(np.ascontiguousarray(np.rot90(frame, turns)))
            size = Size(*image.size)
        else:
            if known is not None:  # a layout whose names have it takes images as they are stored
                settings = settings.model_copy(update={"exif_rotation": False})
            data = path.read_bytes()
            size = upright_size(data, item.image, settings)
            shrink = shrink_to(size, Size(2 * side, 2 * side))
            image = decode(data, item.image, settings, shrink=shrink)
    except SourceError as error:
        return Look(known, None, error.what)
    except OSError as error:
        return Look(known, None, f"cannot be read ({error.strerror})")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Look(size, image)


class ContactSheets:
    """Sheets of the thumbnails of a page, in their order.

    Args:
        count: of thumbnails.

    Attributes:
        side: largest side of a thumbnail, in pixels.
        sheets: data URIs.
    """

    def __init__(self, count: int) -> None:
        self.side = next((side for most, side in _SIDES if count <= most), _LEAST)
        self.sheets: list[str] = []
        self._limit = min(_MOST, _BYTES // max(1, count))
        self._quality = 0  # index of the last sheet's

    def add(self, images: list[Image.Image | None]) -> list[Place | None]:
        """Draw a sheet of 100 images at most; return their places."""
        if not any(images):
            return [None] * len(images)
        rows = -(-len(images) // ACROSS)
        sheet = Image.new("RGB", (min(len(images), ACROSS) * self.side, rows * self.side))
        places: list[Place | None] = []
        for number, image in enumerate(images):
            top, left = (self.side * each for each in divmod(number, ACROSS))
            if image is None:
                places.append(None)
                continue
            sheet.paste(image, (left, top))
            places.append((len(self.sheets), left, top, *image.size))
        self.sheets.append(self._encoded(sheet, self._limit * len(images)))
        return places

    def _encoded(self, sheet: Image.Image, limit: int) -> str:
        """Return a sheet in the best quality that keeps a limit in bytes."""
        self._quality = max(0, self._quality - 1)  # most sheets of a page need a similar one
        while True:
            uri = embedded(sheet, "avif", quality=_QUALITIES[self._quality], speed=8)
            if len(uri) * 3 // 4 <= limit or self._quality == len(_QUALITIES) - 1:
                return uri
            self._quality += 1
