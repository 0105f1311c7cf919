"""From the bytes of an image to the pixels that sd-scripts hands to its VAE, oddities included.

No EXIF rotation; two ways of scaling; transparency that is left out unseen.
Source: sd-scripts, library/train_util.py, `load_image` and `trim_and_resize_if_required`, and
library/utils.py, `resize_image`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentmake.buckets import Placement, Size
from latentmake.config import Dataset
from latentmake.config.models import Architecture
from latentmake.config.sdscripts import bucketing
from latentmake.errors import SourceError
from latentmake.media import opened_image
from latentmake.pixels import refuse_narrow
from latentmake.sdscripts.buckets import place

__all__ = ["fit", "open_image", "placement"]

cv2.setNumThreads(1)  # files are read side by side already


def open_image(data: bytes, path: str, max_pixels: int, *, alpha: bool) -> NDArray[np.uint8]:
    """Decode an image as stored.

    Args:
        data: the file's bytes.
        path: names it in errors.
        max_pixels: an image of more is refused.
        alpha: whether its transparency counts.

    Returns:
        Pixels [height, width, 3], or 4 with `alpha`, 0 to 255.

    Raises:
        SourceError: it is empty, no image, cut short, or has too many pixels.
    """
    mode = "RGBA" if alpha else "RGB"
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        image.load()
        return np.array(image if image.mode == mode else image.convert(mode), np.uint8)


def placement(
    image: Size,
    resolution: tuple[int, int],
    settings: Mapping[str, Any],
    architecture: Architecture,
    path: str,
) -> Placement:
    """Return how an image is brought to its size.

    Args:
        image: its own size as stored, in pixels.
        resolution: width and height asked for, in pixels.
        settings: the dataset's section of the configuration.
        architecture: of the model.
        path: names it in errors.

    Raises:
        SourceError: it is so small or narrow that nothing would be left of it, or that it would
            first have to be scaled up beyond all measure.
    """
    dataset = Dataset.model_validate(settings)
    buckets = bucketing(dataset, architecture) if dataset.fit == "bucket" else None
    try:
        found = place(image, Size(*resolution), buckets)
    except ValueError as error:
        raise SourceError(
            f"{error} ({image.width} x {image.height})",
            where=path,
            mend="remove it, or leave out the dataset's `bucket_no_upscale`",
        ) from None
    refuse_narrow(image, found, dataset.max_image_pixels, path)
    return found


def fit(pixels: NDArray[np.uint8], found: Placement) -> NDArray[np.uint8]:
    """Bring an image to its size: by OpenCV's area averaging where no side grows, else by Lanczos.

    Args:
        pixels: [height, width, 3 or 4], 0 to 255.
        found: how.

    Returns:
        Pixels [height, width, 3 or 4], in one piece.
    """
    height, width = pixels.shape[:2]
    resized, left, top, target = found
    if (width, height) != resized:
        if width >= resized.width and height >= resized.height:
            pixels = np.asarray(cv2.resize(pixels, resized, interpolation=cv2.INTER_AREA), np.uint8)
        else:
            picture = Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS)
            pixels = np.array(picture)
    cut = pixels[top : top + target.height, left : left + target.width]
    return np.ascontiguousarray(cut, dtype=np.uint8)
