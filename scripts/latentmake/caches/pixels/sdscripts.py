"""Pixels as sd-scripts hands them to its VAE, from the bytes of an image.

Oddities included: no EXIF rotation, two ways of scaling, transparency dropped unseen.
Source: sd-scripts, `load_image` and `trim_and_resize_if_required` of library/train_util.py, and
`resize_image` of library/utils.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np

from latentmake.caches.inputs import Reading, Sample, stored_size
from latentmake.caches.pixels import Array
from latentmake.caches.pixels.scaling import fit
from latentmake.files.media import check_image, load, opened_image
from latentmake.files.readers import Readers
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order
from latentmake.plan.target import Target


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Make the samples of an image.

    Raises:
        SourceError: the image is damaged, too large, too small, too narrow, or was changed.
    """
    dataset, item, digest = order.dataset_settings, reading.item, reading.content
    path, alpha = item.source or "", dataset.alpha_mask
    image = open_image(reading.data, path, dataset.max_image_pixels, alpha=alpha)
    size = stored_size(item, (image.shape[1], image.shape[0]))
    for target, key in reading.missing.items():
        fitted = fit(image, order.layout.place(size, target.size or size, dataset, path))
        mask = fitted[:, :, 3] if alpha else None
        yield Sample(key, digest, item, fitted[:, :, :3], size, alpha=mask)


def check(order: Order, reading: Reading, readers: Readers | None) -> None:
    """Check the header of an image for sd-scripts' own code; errors are those of `samples_of`."""
    dataset, path = order.dataset_settings, reading.item.source or ""
    found, _ = check_image(reading.data, path, dataset.max_image_pixels)
    fitted_sizes(order, stored_size(reading.item, found), reading.missing, path)


def fitted_sizes(order: Order, size: Size, missing: Iterable[Target], path: str) -> list[Size]:
    """Return the sizes that an image or a frame is brought to for its targets.

    Raises:
        SourceError: it is too narrow for one of them.
    """
    place, settings = order.layout.place, order.dataset_settings
    return [place(size, each.size or size, settings, path).target for each in missing]


def open_image(data: bytes, path: str, max_pixels: int, *, alpha: bool | None = None) -> Array:
    """Decode an image as stored: [height, width, 3], or 4 with `alpha`, by default those of RGBA.

    Converting to RGB, Pillow cuts off 16-bit greyscale at 255, and drops a palette's transparency.

    Raises:
        SourceError: it is empty, no image, cut short, or too large.
    """
    modes = {None: ("RGB", "RGBA"), False: ("RGB",), True: ("RGBA",)}[alpha]
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        load(image, path)
        return np.array(image if image.mode in modes else image.convert(modes[0]))
