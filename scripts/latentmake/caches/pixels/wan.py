"""Pixels as musubi-tuner hands them to Wan's VAE, of images and of the frames of videos.

Oddities included, so that its trainer cannot tell our caches from its own: no EXIF rotation, two
ways of scaling, transparency dropped unseen.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from PIL import Image

from latentmake.caches.inputs import Sample, SourceBytes, stored_size
from latentmake.caches.pixels.arrays import Array
from latentmake.caches.pixels.scaling import cover
from latentmake.errors import SourceError
from latentmake.files.media import check_image, load, opened_image
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order
from latentmake.plan.target import Target


def samples_of(order: Order, source: SourceBytes, missing: Mapping[Target, str]) -> list[Sample]:
    """Make the samples of an image, with its control if it has one.

    Raises:
        SourceError: the image is damaged, too large, too narrow, or was changed.
    """
    item, data, digest = source[:3]
    dataset, path = order.dataset_settings, item.source or ""
    limit, original = dataset.max_image_pixels, stored_size(item)
    sizes = fitted_sizes(order, original, missing, path)
    image = open_image(data, path, limit)
    stored_size(item, image.size)
    made = _fitted(image, sizes, path, limit)
    controls: Sequence[Array | None] = [None] * len(missing)
    for name, content in zip(item.controls, source.controls, strict=True):
        image = open_image(content, name, limit)
        controls = _fitted(image, sizes, name, limit)
    return [
        Sample(key, digest, item, pixels, original, other)
        for key, pixels, other in zip(missing.values(), made, controls, strict=True)
    ]


def check(order: Order, source: SourceBytes, missing: Iterable[Target]) -> None:
    """Check the headers of an image, its controls and layers for musubi-tuner's own scripts.

    Raises:
        SourceError: one is damaged, too large, too narrow, or was changed; or a layer has no alpha.
    """
    item, path = source.item, source.item.source or ""
    limit = order.dataset_settings.max_image_pixels
    found, _ = check_image(source.data, path, limit)
    fitted_sizes(order, stored_size(item, found), missing, path)
    for name, content in zip(item.controls, source.controls, strict=True):
        check_image(content, name, limit)
    for name, content in zip(item.layers, source.layers, strict=True):
        _, mode = check_image(content, name, limit)
        if mode != "RGBA":
            # musubi-tuner stacks layers, and adds an alpha channel to the first picture alone.
            hint = "save it as RGBA"
            raise SourceError("is a layer without an alpha channel", where=name, hint=hint)


def fitted_sizes(order: Order, size: Size, missing: Iterable[Target], path: str) -> list[Size]:
    """Return the sizes that an image or a frame is brought to for its targets.

    Raises:
        SourceError: it is too narrow for one of them.
    """
    place, settings = order.layout.place, order.dataset_settings
    return [place(size, each.size or size, settings, path).target for each in missing]


def _fitted(image: Image.Image, sizes: Sequence[Size], path: str, limit: int) -> list[Array]:
    pixels = np.array(image)
    return [cover(pixels, size, path=path, max_pixels=limit)[None] for size in sizes]


def open_image(data: bytes, path: str, max_pixels: int) -> Image.Image:
    """Decode an image to RGB or RGBA, as stored.

    Pillow converts all other modes to RGB: 16-bit greyscale is cut off at 255 by that, and the
    transparency of a palette is lost.

    Raises:
        SourceError: it is empty, no image, cut short, or too large.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        load(image, path)
        return image if image.mode in ("RGB", "RGBA") else image.convert("RGB")
