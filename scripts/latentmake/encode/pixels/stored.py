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
from latentmake.plan.orders import Order


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Yield the samples of an image, with its control if it has one; raises SourceError."""
    item, settings, content = reading.work.item, order.dataset_settings, reading.content
    path, limit = item.source or "", settings.max_image_pixels
    alpha = settings.alpha_mask if order.layout.like_sdscripts else None
    image = open_image(reading.data, path, limit, alpha=alpha)
    size = stored_size(item, (image.shape[1], image.shape[0]))
    controls = [(name, open_image(reading.others[name], name, limit)) for name in item.controls]
    for target, key in reading.missing.items():
        placed = reading.places[target]
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
        SourceError: a file is damaged, too large or was changed; or a layer has no alpha channel.
    """
    item, limit = reading.work.item, order.dataset_settings.max_image_pixels
    size, _ = check_image(reading.data, item.source or "", limit)
    stored_size(item, size)
    for name, data in reading.others.items():
        _, mode = check_image(data, name, limit)
        if name in item.layers and mode != "RGBA":
            # musubi-tuner stacks layers, and adds an alpha channel only to the first picture.
            hint = "save it as RGBA"
            raise SourceError("is a layer without an alpha channel", where=name, hint=hint)


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
