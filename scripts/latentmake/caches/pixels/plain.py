"""Pixels of an image for the encoders of the plain layout: decoded by Pillow, scaled by Lanczos.

A JPEG many times as large as the resolution is decoded to a half, a quarter or an eighth.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageColor

from latentmake.caches.inputs import Reading, Sample
from latentmake.caches.pixels import Array
from latentmake.config.datasets import Dataset
from latentmake.files.media import load, opened_image
from latentmake.files.metadata import orientation
from latentmake.geometry.buckets import Placement, Size
from latentmake.plan.orders import Order

# EXIF orientation -> transposition. Not ImageOps.exif_transpose: it rewrites the EXIF as well, and
# fails for odd entries that no viewer minds.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_JPEG = b"\xff\xd8\xff"
_SHRINKS = (1, 2, 4, 8)  # of libjpeg
# A JPEG is decoded to no less than so many times its size at a resolution (tests/bench/README.md).
_RESERVE = 6

# Of torch, about the array of an image, which `lanczos` only reads.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Make the samples of an image; raises SourceError."""
    item, settings, size = reading.work.item, order.dataset_settings, reading.size
    path, images = item.source or "", dict[int, Array]()
    for target, key in reading.missing.items():
        placed, shrink = order.layout.place(size, target.size or size, settings, path), 1
        if reading.data.startswith(_JPEG):
            # At a fraction of which its sides are whole numbers: otherwise the last block of pixels
            # would reach beyond the picture, and the first one if it is turned.
            width, height = placed.resized
            shrink = math.gcd(shrink_to(size, Size(_RESERVE * width, _RESERVE * height)), *size)
        if shrink not in images:
            image = decode(reading.data, path, settings, shrink=shrink)
            images[shrink] = np.asarray(image)
        yield Sample(key, reading.content, item, fit(images[shrink], placed), size)


def shrink_to(size: Size, least: Size) -> int:
    """Return to which fraction, 1 / n, a JPEG is decoded if any size from `least` on will do."""
    room = min(size.width // least.width, size.height // least.height)
    return max(each for each in _SHRINKS if each <= max(room, 1))


def decode(data: bytes, path: str, settings: Dataset, *, shrink: int = 1) -> Image.Image:
    """Decode an image to RGB, upright, without transparency; raises SourceError.

    With `shrink` a JPEG is decoded to that fraction of its size, 1 / n, sides rounded up, in less
    time: its pixels are the means of n x n (source: libjpeg-turbo, `jidctred.c`), but for colours
    of half the resolution and the rounding of values beyond black and white.
    """
    with opened_image(io.BytesIO(data), path, settings.max_image_pixels) as image:
        if shrink > 1:
            image.draft("RGB", (image.width // shrink, image.height // shrink))
        load(image, path)
        if settings.exif_rotation and image.format != "TIFF":  # Pillow turns a TIFF itself
            method = _UPRIGHT.get(orientation(image))
            image = image if method is None else image.transpose(method)
        return _to_rgb(image, settings.background)


def _to_rgb(image: Image.Image, background: str) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
        values = np.asarray(image).astype(np.float32)
        # 16-bit greyscale, which Pillow's own conversion cuts off at 255. Modes I and F do not tell
        # their range.
        scale = 257.0 if image.mode.startswith("I;16") or values.max(initial=0) > 255 else 1.0
        image = Image.fromarray(np.clip(values / scale + 0.5, 0, 255).astype(np.uint8))
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, ImageColor.getrgb(background))
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


def fit(pixels: Array, placed: Placement) -> Array:
    """Scale an image by Lanczos to cover its target size, and cut it around its centre.

    The pixels of a resolution are the same whichever others are made of the image.

    Args:
        pixels: [height, width, 3 or 4], writable; channels after the third are dropped.
        placed: how it covers its size.

    Returns:
        [height, width, 3], contiguous.
    """
    resized, left, top, target = placed
    if pixels.shape[:2] != (resized.height, resized.width):
        pixels = lanczos(pixels, resized)
    return np.array(pixels[top : top + target.height, left : left + target.width, :3], order="C")


def lanczos(pixels: Array, size: Size) -> Array:
    """Scale a picture by Lanczos over its full extent: first rows, then columns.

    By torch's kernel of 8 bits, in a tenth of Pillow's time. For any picture whose sides both grow
    or both shrink it differs from Pillow's by at most 2 levels of 255, by 45 dB PSNR at least.
    By Pillow where torch is too old to have this kernel.

    Pixels are [height, width, channels], those of the result not contiguous.
    """
    import torch  # only here: a job that finds everything fresh scales nothing

    if not hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
        return by_pillow(pixels, size)
    if not pixels.flags.writeable:  # an image that Pillow decoded, of which torch would warn
        pixels = pixels.copy()
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    threads = torch.get_num_threads()  # of this thread, which is one of several that read
    torch.set_num_threads(1)
    try:
        scaled = torch.nn.functional.interpolate(
            planes, (size.height, size.width), mode="lanczos", antialias=True
        )
    finally:
        torch.set_num_threads(threads)
    found: Array = scaled[0].permute(1, 2, 0).numpy()
    return found


def by_pillow(pixels: Array, size: Size) -> Array:
    """Do the same by Pillow alone, whose own order of rows and columns depends on the shape."""
    rows = Image.fromarray(pixels).resize((size.width, pixels.shape[0]), Image.Resampling.LANCZOS)
    return np.array(rows.resize(size, Image.Resampling.LANCZOS))
