"""Scaling of pictures and frames as sd-scripts and musubi-tuner do it.

Processes that read videos import this, and so neither configuration nor plan.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from latentmake.caches.pixels import Array
from latentmake.geometry import buckets
from latentmake.geometry.buckets import Placement, Size

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
            pixels = np.array(Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS))
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
    pixels = np.array(image) if isinstance(image, Image.Image) else image
    size = Size(pixels.shape[1], pixels.shape[0])
    placement = buckets.cover(size, target, max_pixels, path)
    found = fit(pixels, placement)[:, :, :3]
    return np.array(found, order="C") if placement.resized == size else np.ascontiguousarray(found)


Key = tuple[Size, Size]
"""Size of a clip's frames, and the resolution whose bucket it is."""


class Film(NamedTuple):
    """A video or npz clip.

    Attributes:
        path: of the file.
        rotation: degrees clockwise by which frames are turned first.
        max_pixels: most pixels of a scaled frame before it is cut, see `cover`.
        bucket: of a control, step of the buckets among which its own shape, that of its first
            frame, has one; 0 where each has the resolution.
    """

    path: str
    rotation: int = 0
    max_pixels: int = MAX_PIXELS
    bucket: int | None = None

    def scaled(self, frame: Array, key: Key, shape: Size | None) -> Array:
        """Scale a frame; that of a control of some shape twice, as musubi-tuner does."""
        size, resolution = key
        if self.rotation:
            frame = np.rot90(frame, -self.rotation // 90)
        if shape is not None:
            own = resolution
            if step := self.bucket:
                widths = buckets.widths(resolution, step, step)
                own = buckets.nearest_bucket(shape, resolution, widths)
            frame = cover(frame, own, path=self.path, max_pixels=self.max_pixels)
        return cover(frame, size, path=self.path, max_pixels=self.max_pixels)
