"""Pixels for the encoders of the plain layout: decoded by Pillow, scaled by Lanczos.

A captioner gets the complete upright image, or frames of a video; its processor scales them.

A JPEG that is many times larger than the resolution is decoded to 1/2, 1/4 or 1/8 of its size.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageColor

from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.data.probe import used_part
from latentmake.encode.pixels import Array
from latentmake.encode.reading import Reading, Sample
from latentmake.formats.media import load, opened_image
from latentmake.formats.metadata import orientation
from latentmake.formats.video import probe, read_frames
from latentmake.geometry.buckets import Placement, Size
from latentmake.geometry.clips import WAN_FPS
from latentmake.plan.orders import Order

# EXIF orientation -> transposition. ImageOps.exif_transpose would rewrite the EXIF as well, and
# fails for odd entries that viewers ignore.
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
_SHRINKS = (1, 2, 4, 8)  # libjpeg decodes to 1 / n of the size
# A shrunk JPEG has at least this many times the size that it is scaled to (tests/bench/README.md).
_RESERVE = 6

# torch warns about read-only arrays of images. `lanczos` does not write to them.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Yield the samples of an image; raises SourceError."""
    item, settings, size = reading.work.item, order.dataset_settings, reading.size
    path, images = item.source or "", dict[int, Array]()
    for target, key in reading.missing.items():
        placed, shrink = reading.places[target], 1
        if reading.data.startswith(_JPEG):
            # `gcd`: n must divide both sides. Otherwise the last block of pixels would reach beyond
            # the picture; in a rotated picture this is the first block.
            width, height = placed.resized
            shrink = math.gcd(shrink_to(size, Size(_RESERVE * width, _RESERVE * height)), *size)
        if shrink not in images:
            image = decode(reading.data, path, settings, shrink=shrink)
            images[shrink] = np.asarray(image)
        yield Sample(key, reading.content, item, fit(images[shrink], placed), size)


def pictures_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Yield the sample of an item for a captioner; raises SourceError."""
    item, settings = reading.work.item, order.dataset_settings
    if settings.video:
        frames = frames_of(item, settings, settings.captioners[order.model].frames)
        pixels = np.stack(frames)
    else:
        pixels = np.asarray(decode(reading.data, item.image, settings))
    height, width = pixels.shape[-3:-1]
    for key in dict.fromkeys(reading.missing.values()):
        yield Sample(key, reading.content, item, pixels, (width, height))


def frames_of(item: Item, settings: Dataset, count: int) -> list[Array]:
    """Return `count` frames of an item's video, spread evenly over the part that the item uses.

    Each frame is [H, W, 3]. If there are fewer frames, all of them are returned.

    Raises:
        SourceError: the video cannot be read, or its row names frames that it does not have.
    """
    media = [*probe(item.image)][-1]
    media, span = used_part(item, settings, media, WAN_FPS)
    kept = item._replace(media=media, span=span).indices(settings.source_fps, WAN_FPS)
    count = min(count, len(kept))
    places = {round((len(kept) - 1) * number / max(1, count - 1)) for number in range(count)}
    wanted = sorted({kept[place] for place in places})
    return [pixels for _, pixels in read_frames(item.image, wanted) if pixels is not None]


def shrink_to(size: Size, least: Size) -> int:
    """Return the largest n such that 1 / n of a JPEG's size is still at least `least`."""
    room = min(size.width // least.width, size.height // least.height)
    return max(shrink for shrink in _SHRINKS if shrink <= max(room, 1))


def decode(data: bytes, path: str, settings: Dataset, *, shrink: int = 1) -> Image.Image:
    """Decode an image to RGB, upright, without transparency; raises SourceError.

    With `shrink` a JPEG is decoded to 1 / n of its size, sides rounded up, in less time. A pixel is
    the mean of n x n pixels (source: libjpeg-turbo, `jidctred.c`). Two things differ from the exact
    mean: colours stored at half the resolution, and the rounding of values beyond black and white.
    """
    with opened_image(io.BytesIO(data), path, settings.max_image_pixels) as image:
        if shrink > 1:
            image.draft("RGB", (image.width // shrink, image.height // shrink))
        load(image, path)
        if settings.exif_rotation and image.format != "TIFF":  # Pillow rotates a TIFF itself
            method = _UPRIGHT.get(orientation(image))
            image = image if method is None else image.transpose(method)
        return _to_rgb(image, settings.background)


def _to_rgb(image: Image.Image, background: str) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
        values = np.asarray(image).astype(np.float32)
        # Pillow's own conversion cuts off 16-bit greyscale at 255. Modes I and F have no fixed
        # range, so the largest value decides.
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
    """Scale an image by Lanczos to cover its target size, and crop it around its centre.

    The pixels of a resolution do not depend on the other resolutions of the image.

    Args:
        pixels: [height, width, 3 or 4], writable; channels after the third are dropped.
        placed: scaled size, offset of the crop, and target size.

    Returns:
        [height, width, 3], contiguous.
    """
    resized, left, top, target = placed
    if pixels.shape[:2] != (resized.height, resized.width):
        pixels = lanczos(pixels, resized)
    return np.array(pixels[top : top + target.height, left : left + target.width, :3], order="C")


def lanczos(pixels: Array, size: Size) -> Array:
    """Scale a picture by Lanczos over its full extent: first rows, then columns.

    This uses torch's 8-bit kernel, which takes a tenth of Pillow's time, or Pillow if torch is too
    old to have it. If both sides grow or both shrink, the kernels differ by at most 2 levels of
    255, and the PSNR is at least 45 dB.

    Pixels are [height, width, channels]. The result is not contiguous.
    """
    import torch  # imported late: a job whose targets are fresh scales nothing

    if not hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
        return by_pillow(pixels, size)
    if not pixels.flags.writeable:  # torch would warn about an image that Pillow decoded
        pixels = pixels.copy()
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    # Several threads read and scale at a time, so a single scaling takes one core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scaled = torch.nn.functional.interpolate(
            planes, (size.height, size.width), mode="lanczos", antialias=True
        )
    finally:
        torch.set_num_threads(threads)
    result: Array = scaled[0].permute(1, 2, 0).numpy()
    return result


def by_pillow(pixels: Array, size: Size) -> Array:
    """Scale a picture with Pillow: first rows, then columns, in two calls.

    In a single call Pillow's order depends on the shape.
    """
    rows = Image.fromarray(pixels).resize((size.width, pixels.shape[0]), Image.Resampling.LANCZOS)
    return np.array(rows.resize(size, Image.Resampling.LANCZOS))
