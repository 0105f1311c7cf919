"""Pixels of an image as sd-scripts and musubi-tuner hand them to their VAEs, without rotation.

Oddities included, so that no trainer can tell our caches from its own: no EXIF rotation, two ways
of scaling, transparency dropped unseen.
Source: sd-scripts, `load_image` and `trim_and_resize_if_required` of library/train_util.py, and
`resize_image` of library/utils.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np

from latentmake.caches.inputs import Reading, Sample, stored_size
from latentmake.caches.pixels import Array
from latentmake.caches.pixels.scaling import cover, fit
from latentmake.errors import SourceError
from latentmake.files.media import check_image, load, opened_image
from latentmake.geometry.buckets import Placement, Size
from latentmake.plan.orders import Order


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Make the samples of an image, with its control if it has one; raises SourceError."""
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
        made = [cover(x, placed.target, path=name, max_pixels=limit) for name, x in controls]
        control = made[-1] if made else None
        yield Sample(key, content, item, fitted[:, :, :3], size, control, alpha=mask)


def check(order: Order, reading: Reading) -> None:
    """Check the headers of an image, its controls and layers for the trainers' own code.

    Raises:
        SourceError: one is damaged, too large, too narrow, or was changed; or a layer has no alpha.
    """
    item, limit = reading.work.item, order.dataset_settings.max_image_pixels
    found, _ = check_image(reading.data, item.source or "", limit)
    _places(order, reading, stored_size(item, found))
    for name, data in reading.others.items():
        _, mode = check_image(data, name, limit)
        if name in item.layers and mode != "RGBA":
            # musubi-tuner stacks layers, and adds an alpha channel to the first picture alone.
            hint = "save it as RGBA"
            raise SourceError("is a layer without an alpha channel", where=name, hint=hint)


def _places(order: Order, reading: Reading, size: Size) -> list[Placement]:
    """Return how an image of a size is brought to those of its missing targets."""
    settings, path = order.dataset_settings, reading.work.item.source or ""
    sizes = (each.size or size for each in reading.missing)
    return [order.layout.place(size, each, settings, path) for each in sizes]


def open_image(data: bytes, path: str, max_pixels: int, *, alpha: bool | None = None) -> Array:
    """Decode an image as stored: [height, width, 3], 4 with `alpha`; raises SourceError.

    By default an RGBA has 4. Converting to RGB, Pillow cuts off 16-bit greyscale at 255, and drops
    a palette's transparency.
    """
    modes = {None: ("RGB", "RGBA"), False: ("RGB",), True: ("RGBA",)}[alpha]
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        load(image, path)
        return np.array(image if image.mode in modes else image.convert(modes[0]))
