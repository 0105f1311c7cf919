"""Samples: inputs of an encoder, made of the bytes of an item's source."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.config.datasets import Dataset
from latentmake.data.captions import decode_text
from latentmake.data.item import BUCKET, Item
from latentmake.errors import SourceError
from latentmake.files.media import check_image, probe_image
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order
from latentmake.plan.target import Target


class SourceBytes(NamedTuple):
    """Bytes of an item's source, of its controls and layers, and the digest of all."""

    item: Item
    data: bytes
    digest: str
    controls: tuple[bytes, ...] = ()
    layers: tuple[bytes, ...] = ()


class Sample(NamedTuple):
    """Input of an encoder for one target.

    Attributes:
        key: of the target.
        source: digest of what it is made from.
        item: of the target.
        content: a caption, or pixels, 0 to 255: [H, W, 3] of an image, [F, H, W, 3] for Wan.
        original: width and height of the image before it was fitted; (0, 0) for a caption.
        control: pixels of the control, of the same shape.
        clip: whether it is a clip of a video.
        alpha: transparency, [H, W], if it counts.
        tokens: numbers of tokens that a caption takes in each encoder, with its padding.
    """

    key: str
    source: str
    item: Item
    content: NDArray[np.uint8] | str
    original: tuple[int, int]
    control: NDArray[np.uint8] | None = None
    clip: bool = False
    alpha: NDArray[np.uint8] | None = None
    tokens: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels, or `tokens` of a caption; the same for all samples of a batch."""
        return self.tokens if isinstance(self.content, str) else self.content.shape

    @property
    def cost(self) -> int:
        """Pixels of a picture or of a clip's frame, or tokens: memory grows with their number."""
        return max(self.size, default=1)

    @property
    def size(self) -> tuple[int, ...]:
        """Frames and pixels, which tell what memory it takes; `tokens` of a caption."""
        if isinstance(self.content, str):
            return self.tokens
        *frames, height, width, _ = self.content.shape
        return (*(frames or [1]), height * width)


def samples_of(order: Order, source: SourceBytes, missing: Mapping[Target, str]) -> list[Sample]:
    """Make the samples of an item's missing targets (with their keys).

    Images that another program encodes are checked by their headers, and make no samples.

    Raises:
        SourceError: the bytes are damaged, or an image was changed.
    """
    if order.kind == "text":
        item, data, digest = source[:3]
        if (image := item.file(BUCKET)) is not None:
            _check_pictures(order, source, image.path)
        text = order.layout.caption(caption_of(data, item.source, order.dataset_settings))
        return [Sample(key, digest, item, text, (0, 0)) for key in dict.fromkeys(missing.values())]
    module = import_module(f"latentmake.caches.pixels.{order.layout.encoding}")
    if order.is_external:
        module.check(order, source, missing)
        return []
    samples: list[Sample] = module.samples_of(order, source, missing)
    return samples


def _check_pictures(order: Order, source: SourceBytes, image: str) -> None:
    """Refuse control images of a text that cannot be opened, and an image of another size."""
    for path, data in zip(source.item.controls, source.controls, strict=True):
        check_image(data, path, order.dataset_settings.max_image_pixels)
    media = probe_image(image)
    stored_size(source.item, (media.width, media.height))


def stored_size(item: Item, found: tuple[int, int] | None = None) -> Size:
    """Return the size that an item's image or video had while planning.

    Raises:
        SourceError: another size is `found` now.
    """
    size = None if item.media is None else Size(item.media.width, item.media.height)
    if size is None or (found is not None and found != size):
        raise SourceError(
            "was changed after the build began",
            where=item.image,
            hint="run the same command again",
        )
    return size


def caption_of(data: bytes, path: str | None, settings: Dataset) -> str:
    """Decode a caption; `path` is its file, None where it lies in none.

    Raises:
        SourceError: it is not UTF-8, or empty where that is not allowed.
    """
    caption = decode_text(data, path or "").strip()
    if not caption and path is not None and settings.empty_caption != "allow":
        raise SourceError(
            "is an empty caption",
            where=path,
            hint="describe the image, or set empty_caption: allow",
        )
    return caption
