"""Thumbnails of items for a page, and the sizes of items in pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.formats.endings import NPZ, VIDEO_EXTENSIONS
from latentmake.formats.media import opened, opened_image, upright_size
from latentmake.formats.metadata import orientation
from latentmake.formats.readers import Readers
from latentmake.geometry.buckets import Size
from latentmake.pages.page import embedded

if TYPE_CHECKING:
    from PIL import Image

_SIDE = 192  # longest side of a thumbnail, in pixels


def look_at(
    settings: Dataset, item: Item, readers: Readers, *, embeds: bool
) -> tuple[Size | None, str | None, str]:
    """Return the size of a dataset's item, its thumbnail as a data URI, and its fault, if any.

    The thumbnail of a video is its first frame. An item at a URL has neither size nor thumbnail.
    Without `embeds`, only the size is read.
    """
    if item.is_remote:
        return None, None, ""
    # If file names contain an item's size, the trainer's layout does not rotate images.
    if item.media is not None:
        settings = settings.model_copy(update={"exif_rotation": False})
    try:
        if not embeds:
            return _size_of(item, settings), None, ""
        size, image = _opened(item, settings, readers, _SIDE)
    except SourceError as error:
        return None, None, error.what
    except OSError as error:
        return None, None, f"cannot be read ({error.strerror})"
    image.thumbnail((_SIDE, _SIDE))
    return size, embedded(image, "webp", quality=75), ""


def picture(settings: Dataset, item: Item, readers: Readers, side: int) -> bytes:
    """Return the picture of a dataset's item as WebP, at most `side` pixels wide and high.

    Raises:
        SourceError: it is damaged.
        OSError: it cannot be read.
    """
    _, image = _opened(item, settings, readers, side)
    image.thumbnail((side, side))
    data = io.BytesIO()
    image.save(data, "webp", quality=80, method=2, lossless=max(image.size) < _SIDE)
    return data.getvalue()


def _size_of(item: Item, settings: Dataset) -> Size:
    """Return the size of an item as it is displayed; an image's size is read from its header."""
    if item.media is not None:
        size = Size(item.media.width, item.media.height)
        return size if item.media.rotation % 180 == 0 else Size(*size[::-1])
    limit = settings.max_image_pixels
    with opened(item.image) as file, opened_image(file, item.image, limit) as image:
        turns = settings.exif_rotation and image.format != "TIFF"
        turned = turns and orientation(image, decodes=False) >= 5
        return Size(*(image.size[::-1] if turned else image.size))


def _opened(item: Item, settings: Dataset, readers: Readers, side: int) -> tuple[Size, Image.Image]:
    from PIL import Image

    from latentmake.encode.pixels.plain import decode, shrink_to
    from latentmake.formats.video import frame_of

    path = Path(item.image)
    if path.suffix.lower() in {*VIDEO_EXTENSIONS, NPZ}:
        first = item.span.first if item.span else 0
        (frame,) = readers.iterate(item.image, frame_of, item.image, first)
        image = Image.fromarray(frame)
        if item.media is not None and item.media.rotation:
            image = image.rotate(-item.media.rotation, expand=True)
        return Size(*image.size), image
    data = path.read_bytes()
    turns, limit = settings.exif_rotation, settings.max_image_pixels
    size = upright_size(data, item.image, limit, turns=turns)
    shrink = shrink_to(size, Size(2 * side, 2 * side))
    return size, decode(data, item.image, settings, shrink=shrink)
