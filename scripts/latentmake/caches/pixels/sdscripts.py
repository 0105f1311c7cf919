"""From the bytes of an image to the pixels that sd-scripts hands to its VAE, oddities included.

No EXIF rotation; two ways of scaling; transparency that is left out unseen.
Source: sd-scripts, library/train_util.py, `load_image` and `trim_and_resize_if_required`, and
library/utils.py, `resize_image`.
"""

from __future__ import annotations

import io

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentmake.files.media import opened_image
from latentmake.geometry.buckets import Placement

__all__ = ["fit", "open_image"]

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
