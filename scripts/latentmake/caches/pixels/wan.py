"""Pixels as musubi-tuner hands them to Wan's VAE, of images and of the frames of videos.

Oddities included, so that its trainer cannot tell our caches from its own: no EXIF rotation, two
ways of scaling, transparency dropped unseen.
"""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.caches.inputs import Reading, Sample, stored_size
from latentmake.caches.pixels.scaling import cover
from latentmake.caches.pixels.sdscripts import fitted_sizes, open_image
from latentmake.errors import SourceError
from latentmake.files.media import check_image
from latentmake.files.readers import Readers
from latentmake.files.video import frame_of
from latentmake.plan.orders import Order


def samples_of(order: Order, reading: Reading) -> Iterator[Sample]:
    """Make the samples of an image, with its control if it has one.

    Raises:
        SourceError: the image is damaged, too large, too narrow, or was changed.
    """
    item, limit, size = reading.item, order.dataset_settings.max_image_pixels, reading.size
    path = item.source or ""
    sizes = fitted_sizes(order, size, reading.missing, path)
    image = open_image(reading.data, path, limit)
    stored_size(item, (image.shape[1], image.shape[0]))
    pictures = [(path, image)]
    for name in item.controls:
        pictures.append((name, open_image(reading.others[name], name, limit)))
    for target_size, key in zip(sizes, reading.missing.values(), strict=True):
        made = [cover(x, target_size, path=name, max_pixels=limit)[None] for name, x in pictures]
        control = made[-1] if len(made) > 1 else None
        yield Sample(key, reading.content, item, made[0], size, control)


def check(order: Order, reading: Reading, readers: Readers | None) -> None:
    """Check the headers of an image, its controls and layers for musubi-tuner's own scripts.

    A video and its control are opened.

    Raises:
        SourceError: one is damaged, too large, too narrow, or was changed; or a layer has no alpha.
    """
    item, path = reading.item, reading.item.source or ""
    limit = order.dataset_settings.max_image_pixels
    if readers is not None:
        videos = (path, *item.controls)
        first, *_ = [frame for name in videos for frame in readers.each(name, frame_of, name, 0)]
        found = (first.shape[1], first.shape[0])
    else:
        found, _ = check_image(reading.data, path, limit)
    fitted_sizes(order, stored_size(item, found), reading.missing, path)
    for name, data in reading.others.items():
        _, mode = check_image(data, name, limit)
        if name in item.layers and mode != "RGBA":
            # musubi-tuner stacks layers, and adds an alpha channel to the first picture alone.
            hint = "save it as RGBA"
            raise SourceError("is a layer without an alpha channel", where=name, hint=hint)
