"""Scaling of pictures and frames as sd-scripts and musubi-tuner do it.

Processes that read videos import this, and so neither configuration nor plan.
"""

from __future__ import annotations

import cv2
import numpy as np
from PIL import Image

from latentmake.caches.pixels.arrays import Array, array_of
from latentmake.geometry.buckets import Placement, Size, place, refuse_narrow

MAX_PIXELS = 178_956_970  # Pillow's own limit for a decompression bomb

cv2.setNumThreads(1)  # files are read in parallel already


def fit(pixels: Array, found: Placement) -> Array:
    """Scale and cut an image: by OpenCV's area averaging where no side grows, else by Lanczos."""
    height, width = pixels.shape[:2]
    resized, left, top, target = found
    if (width, height) != resized:
        if width >= resized.width and height >= resized.height:
            pixels = np.asarray(cv2.resize(pixels, resized, interpolation=cv2.INTER_AREA), np.uint8)
        else:
            picture = Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS)
            pixels = np.array(picture)
    return np.ascontiguousarray(pixels[top : top + target.height, left : left + target.width])


def cover(
    image: Image.Image | Array, target: Size, *, path: str = "", max_pixels: int = MAX_PIXELS
) -> Array:
    """Scale an image to cover its target size and cut it around its centre.

    Alpha takes part in Lanczos' scaling up, and is dropped at the end.

    Returns:
        [height, width, 3], contiguous, a copy.

    Raises:
        SourceError: it is so narrow that it would be scaled up to more than `max_pixels`.
    """
    pixels = array_of(image) if isinstance(image, Image.Image) else image
    size = Size(pixels.shape[1], pixels.shape[0])
    placement = place(size, target)
    refuse_narrow(size, placement, max_pixels, path)
    found = fit(pixels, placement)[:, :, :3]
    return np.array(found, order="C") if placement.resized == size else np.ascontiguousarray(found)
