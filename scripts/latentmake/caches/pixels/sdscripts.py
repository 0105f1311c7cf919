"""Pixels as sd-scripts hands them to its VAE, from the bytes of an image.

Oddities included: no EXIF rotation, two ways of scaling, transparency dropped unseen.
Source: sd-scripts, `load_image` and `trim_and_resize_if_required` of library/train_util.py, and
`resize_image` of library/utils.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from latentmake.caches.inputs import Reading, Sample, stored_size
from latentmake.caches.pixels.scaling import fit
from latentmake.files.media import check_image, load, opened_image
from latentmake.files.readers import Readers
from latentmake.plan.orders import Order


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
    size = stored_size(reading.item, found)
    for target in reading.missing:
        order.layout.place(size, target.size or size, dataset, path)


def open_image(data: bytes, path: str, max_pixels: int, *, alpha: bool) -> NDArray[np.uint8]:
    """Decode an image as stored: [height, width, 3], or 4 with `alpha`.

    Raises:
        SourceError: it is empty, no image, cut short, or too large.
    """
    mode = "RGBA" if alpha else "RGB"
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        load(image, path)
        return np.array(image if image.mode == mode else image.convert(mode))
