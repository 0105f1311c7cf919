"""Pixels of an image, exactly as sd-scripts and musubi-tuner give them to their VAEs.

Oddities are included, so that our caches equal the trainers' own: EXIF rotation is ignored, there
are two ways of scaling, and transparency is dropped without blending.
Source: sd-scripts, `load_image` and `trim_and_resize_if_required` of library/train_util.py, and
`resize_image` of library/utils.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np

from latentmake.base.errors import SourceError
from latentmake.encode.pixels import Array
from latentmake.encode.pixels.scaling import cover, fit
from latentmake.encode.reading import Reading, Sample, stored_size
from latentmake.formats.media import check_image, load, opened_image
from latentmake.geometry.buckets import Placement, Size
from latentmake.plan.orders import Order


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Yield the samples of an image, with its control if it has one; raises SourceError."""
    item, settings, content = reading.work.item, order.dataset_settings, reading.content
    path, limit = item.source or "", settings.max_image_pixels
    places = _places(order, reading, reading.size)
    alpha = None if order.layout.scales_alpha else settings.alpha_mask
    image = open_image(reading.data, path, limit, alpha=alpha)
    size = stored_size(item, (image.shape[1], image.shape[0]))
    controls = [(name, open_image(reading.others[name], name, limit)) for name in item.controls]
    for placed, key in zip(places, reading.missing.values(), strict=True):
        fitted = fit(image, placed)
        mask = fitted[:, :, 3] if alpha else None
        scaled = [
            cover(pixels, placed.target, path=name, max_pixels=limit) for name, pixels in controls
        ]
        control = scaled[-1] if scaled else None
        yield Sample(key, content, item, fitted[:, :, :3], size, control, alpha=mask)


def check(order: Order, reading: Reading) -> None:
    """Check the headers of an image, its controls and layers before a trainer's code encodes them.

    Raises:
        SourceError: a file is damaged, too large, too narrow, or was changed; or a layer has no
            alpha channel.
    """
    item, limit = reading.work.item, order.dataset_settings.max_image_pixels
    size, _ = check_image(reading.data, item.source or "", limit)
    _places(order, reading, stored_size(item, size))  # raises the error of a narrow image
    for name, data in reading.others.items():
        _, mode = check_image(data, name, limit)
        if name in item.layers and mode != "RGBA":
            # musubi-tuner stacks layers, and adds an alpha channel only to the first picture.
            hint = "save it as RGBA"
            raise SourceError("is a layer without an alpha channel", where=name, hint=hint)


def _places(order: Order, reading: Reading, size: Size) -> list[Placement]:
    """Return how an image is scaled and cropped for each of its missing targets."""
    settings, path = order.dataset_settings, reading.work.item.source or ""
    resolutions = (target.size or size for target in reading.missing)
    return [order.layout.place(size, resolution, settings, path) for resolution in resolutions]


def open_image(data: bytes, path: str, max_pixels: int, *, alpha: bool | None = None) -> Array:
    """Decode an image as stored; raises SourceError.

    When Pillow converts to RGB, it cuts off 16-bit greyscale at 255 and drops the transparency of a
    palette.

    Args:
        data: bytes of the file.
        path: path of the file, for messages.
        max_pixels: largest number of pixels.
        alpha: whether the result has an alpha channel; None: only if the image is RGBA.

    Returns:
        [height, width, 3 or 4].
    """
    modes = {None: ("RGB", "RGBA"), False: ("RGB",), True: ("RGBA",)}[alpha]
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        load(image, path)
        return np.array(image if image.mode in modes else image.convert(modes[0]))
