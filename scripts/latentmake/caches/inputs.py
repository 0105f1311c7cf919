"""Samples: what an encoder gets, made of the bytes of an item's source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.caches.pixels import plain
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size, wan_size
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.sources.caption_pipeline import decode_caption

__all__ = ["Sample", "caption_of", "samples_of"]


class Sample(NamedTuple):
    """One target on its way through the encoder.

    Attributes:
        key: names it in the spool.
        source: digest of what it is made from.
        item: whose target it is.
        content: pixels, [H, W, 3] of an image or [F, H, W, 3] for Wan, or a caption.
        original: width and height of the image before it was fitted, in pixels; (0, 0) for a
            caption.
        control: pixels of the control, of the same shape.
        clip: whether it is a clip of a video.
        alpha: transparency of the pixels, [H, W], 0 to 255; None where it does not count.
    """

    key: str
    source: str
    item: WorkItem
    content: NDArray[np.uint8] | str
    original: tuple[int, int]
    control: NDArray[np.uint8] | None = None
    clip: bool = False
    alpha: NDArray[np.uint8] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """What all samples of one batch share."""
        return () if isinstance(self.content, str) else self.content.shape


def samples_of(
    order: WorkOrder,
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
) -> list[Sample]:
    """Return the samples of an item.

    Args:
        order: says of what kind and how.
        item: whose they are.
        data: the bytes of its source.
        control: the bytes of its control image or video, if it has one.
        content: digest of all that.
        missing: target -> key of those to be made.

    Raises:
        SourceError: the bytes are damaged.
    """
    settings = order.dataset_settings
    if order.kind == "text":
        text = order.layout.caption(caption_of(data, item, settings))
        return [Sample(key, content, item, text, (0, 0)) for key in dict.fromkeys(missing.values())]
    return _PIXELS[order.layout.pixels](order, item, data, control, content, missing)


_Make = Callable[
    [WorkOrder, WorkItem, bytes, bytes, str, Mapping[Target, str]],
    list[Sample],
]


def _images(
    order: WorkOrder,
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
) -> list[Sample]:
    settings = order.dataset_settings
    image = plain.decode(data, item.source or "", settings)
    return [
        Sample(
            key,
            content,
            item,
            plain.fit(image, target.size or (0, 0), settings, item.source or ""),
            image.size,
        )
        for target, key in missing.items()
    ]


def _sdscripts_images(
    order: WorkOrder,
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
) -> list[Sample]:
    from latentmake.caches.pixels import sdscripts
    from latentmake.geometry.sdscripts_buckets import placement

    architecture, dataset = order.model_settings["architecture"], order.dataset_model
    assert dataset is not None
    settings, path = order.dataset_settings, item.source or ""
    alpha = bool(settings.get("alpha_mask"))
    image = sdscripts.open_image(data, path, int(settings["max_image_pixels"]), alpha=alpha)
    size = Size(image.shape[1], image.shape[0])
    if item.media is None or size != (item.media.width, item.media.height):
        raise _changed(item)  # its targets are named by its size
    samples: list[Sample] = []
    for target, key in missing.items():
        resolution = Size(*(target.size or (0, 0)))
        found = placement(size, resolution, dataset, architecture, path)
        fitted = sdscripts.fit(image, found)
        mask = fitted[:, :, 3] if alpha else None
        samples.append(Sample(key, content, item, fitted[:, :, :3], size, alpha=mask))
    return samples


def _size(image: tuple[int, int], target: Target, settings: Mapping[str, Any]) -> Size:
    return wan_size(
        Size(*image),
        Size(*(target.size or (0, 0))),
        bucket=settings["fit"] == "bucket",
        no_upscale=settings["bucket_no_upscale"],
    )


def _wan(
    order: WorkOrder,
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
) -> list[Sample]:
    make = _clips if order.dataset_settings.get("target_frames") else _wan_images
    return make(item, data, control, content, missing, order.dataset_settings)


def _wan_images(
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
    settings: Mapping[str, Any],
) -> list[Sample]:
    from latentmake.caches.pixels import wan

    limit = int(settings["max_image_pixels"])
    image = wan.open_image(data, item.source or "", limit)
    if item.media is None or image.size != (item.media.width, item.media.height):
        raise _changed(item)  # its targets are named by its size
    beside = wan.open_image(control, item.control, limit) if item.control else None
    found: list[Sample] = []
    for target, key in missing.items():
        size = _size(image.size, target, settings)
        fitted = None
        if beside is not None:
            fitted = wan.fit(beside, size, path=item.control or "", max_pixels=limit)[None]
        pixels_ = wan.fit(image, size, path=item.source or "", max_pixels=limit)[None]
        found.append(Sample(key, content, item, pixels_, image.size, fitted))
    return found


def _clips(
    item: WorkItem,
    data: bytes,
    control: bytes,
    content: str,
    missing: Mapping[Target, str],
    settings: Mapping[str, Any],
) -> list[Sample]:
    from latentmake.caches.pixels import wan

    path, source_fps = item.source or "", settings["source_fps"]
    limit = int(settings["max_image_pixels"])
    if item.media is None:
        raise _changed(item)
    original = (item.media.width, item.media.height)
    wanted = [
        (_size(original, target, settings), target.clip)
        for target in missing
        if target.clip is not None
    ]
    made = wan.read_clips(data, path, source_fps, wanted, max_pixels=limit)
    beside: list[NDArray[np.uint8] | None] = [None] * len(made)
    if item.control:
        sizes = [Size(*target.size) for target in missing if target.size is not None]
        asked = [(size, *each) for size, each in zip(sizes, wanted, strict=True)]
        beside = [*wan.read_control(control, item.control, source_fps, asked, max_pixels=limit)]
    return [
        Sample(key, content, item, clip, original, other, clip=True)
        for key, clip, other in zip(missing.values(), made, beside, strict=True)
    ]


_PIXELS: dict[str, _Make] = {"plain": _images, "sdscripts": _sdscripts_images, "wan": _wan}
"""`Layout.pixels` -> what makes the samples of an item."""


def _changed(item: WorkItem) -> SourceError:
    return SourceError(
        "was changed after the build began", where=item.source or "", mend="give the command again"
    )


def caption_of(data: bytes, item: WorkItem, settings: Mapping[str, Any]) -> str:
    """Return the caption that the bytes of an item's source hold.

    Args:
        data: the bytes.
        item: whose caption it is.
        settings: the dataset's `empty_caption`.

    Raises:
        SourceError: it is not UTF-8, or empty where that is not allowed.
    """
    where = item.place
    caption = decode_caption(data, where)
    if not caption and item.source is not None and settings.get("empty_caption") != "allow":
        raise SourceError(
            "is an empty caption",
            where=where,
            mend="describe the image, or set empty_caption: allow",
        )
    return caption
