"""Bucket sizes, the placement of an image in one, and sizes of control images.

The rules are those of musubi-tuner's image datasets, so that every layout cuts an image alike.
Source of control sizes: musubi-tuner, `ImageDataset.retrieve_latent_cache_batches`
(dataset/image_video_dataset.py) and `BucketSelector.calculate_bucket_resolution`
(dataset/bucket.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from latentmake.config.datasets import BUCKET_STEPS, Dataset
from latentmake.errors import SourceError


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int


class Placement(NamedTuple):
    """An image's target size, the size it is resized to before, and the corner of the crop."""

    resized: Size
    left: int
    top: int
    target: Size

    @property
    def name(self) -> str:
        """The part of a key that says what is done to an image: `80x72+8+4:64x64`.

        Two settings that lead to the same placement of an image give the same pixels.
        """
        (width, height), left, top, target = self
        return f"{width}x{height}+{left}+{top}:{target.width}x{target.height}"


@lru_cache(maxsize=256)
def bucket_sizes(resolution: Size, step: int, *, wan: bool = False) -> tuple[Size, ...]:
    """Return the bucket sizes of a resolution, sorted, none twice.

    With s = int(sqrt(area)), widths go from s // 2 rounded down to `step`, up to s, in steps of
    `step`; each goes with the largest multiple of `step` that keeps the area, in both orders.

    Args:
        resolution: its area is what all buckets come near to, in pixels.
        step: every side is a multiple of it, in pixels.
        wan: the widths go on to the first multiple of `step` from s on, which may add a pair:
            160 x 176 and 176 x 160 for 160 x 192. Source: musubi-tuner, `dataset/bucket.py`,
            `BucketSelector`.

    Raises:
        ValueError: the resolution is smaller than one step (for Wan two: musubi-tuner would divide
            by zero).
    """
    area = resolution.width * resolution.height
    side = math.isqrt(area)
    if side < (least := 2 * step if wan else step):
        raise ValueError(
            f"a resolution of {resolution.width} x {resolution.height} has no buckets: it needs "
            f"the area of {least} x {least} pixels"
        )
    sizes: set[Size] = set()
    for width in range(max(side // 2 // step * step, step), side + (step if wan else 1), step):
        height = area // width // step * step
        sizes |= {Size(width, height), Size(height, width)}
    return tuple(sorted(sizes))


@lru_cache(maxsize=4096)
def target_size(
    image: Size,
    resolution: Size,
    *,
    fit: str,
    step: int = 16,
    no_upscale: bool = False,
    wan: bool = False,
) -> Size:
    """Return the size an image is brought to.

    Args:
        image: its own size, upright, in pixels.
        resolution: the size asked for, in pixels.
        fit: `crop`: the resolution itself. `bucket`: the bucket whose width / height is nearest to
            the image's, the first of several.
        step: multiple of which the sides of buckets are.
        no_upscale: with `bucket`, an image whose area is not above the resolution's keeps its size,
            each side rounded down to `step`.
        wan: buckets are Wan's; see `bucket_sizes`.
    """
    if fit == "crop":
        return resolution
    if no_upscale and image.width * image.height <= resolution.width * resolution.height:
        return Size(max(image.width // step * step, step), max(image.height // step * step, step))
    aspect = image.width / image.height
    sizes = bucket_sizes(resolution, step, wan=wan)
    return min(sizes, key=lambda size: abs(size.width / size.height - aspect))


def wan_size(
    image: Size, resolution: Size, *, bucket: bool, no_upscale: bool, step: int = 16
) -> Size:
    """Return the size that musubi-tuner brings an image or a frame to.

    `step` is the architecture's: sides of buckets are multiples of it.

    Its trainer computes the bucket anew from the size in a cache's name, so the very same list is
    needed. Arguments and errors are those of `target_size`.
    """
    fit = "bucket" if bucket else "crop"
    return target_size(image, resolution, fit=fit, step=step, no_upscale=no_upscale, wan=True)


def place(image: Size, target: Size) -> Placement:
    """Return how an image covers its target size: scaled up or down to cover, centre kept.

    The scale is the larger of the two sides' ratios; sides are rounded to the nearest pixel and
    the cut begins at (resized - target) // 2.
    """
    if image == target:
        return Placement(image, 0, 0, target)
    scale = max(target.width / image.width, target.height / image.height)
    resized = Size(
        max(int(image.width * scale + 0.5), target.width),
        max(int(image.height * scale + 0.5), target.height),
    )
    return Placement(
        resized,
        (resized.width - target.width) // 2,
        (resized.height - target.height) // 2,
        target,
    )


def placement(
    image: Size, resolution: tuple[int, int], settings: Dataset, path: str = ""
) -> Placement:
    """Return how an image is brought to its target size, by a dataset's settings.

    Raises:
        SourceError: see `refuse_narrow`.
    """
    target = target_size(
        image,
        Size(*resolution),
        fit=settings.fit,
        step=settings.bucket_reso_steps or BUCKET_STEPS,
        no_upscale=settings.bucket_no_upscale,
    )
    found = place(image, target)
    refuse_narrow(image, found, settings.max_image_pixels, path)
    return found


def refuse_narrow(image: Size, placement: Placement, limit: int, path: str) -> None:
    """Refuse an image that would first be scaled up to more pixels than it has and than a limit.

    Raises:
        SourceError: it would; `path` names it.
    """
    resized = placement.resized.width * placement.resized.height
    if resized > max(limit, image.width * image.height):
        target = placement.target
        raise SourceError(
            f"is too narrow ({image.width} x {image.height}): covering {target.width} x "
            f"{target.height} takes {resized} pixels",
            where=path,
            hint="crop it to a shape closer to the resolution, or remove it",
        )


_VAE_SIDE = 8  # pixels of a side of a latent


def has_own_sizes(settings: Dataset) -> bool:
    """Whether a dataset's control images are brought to sizes of their own."""
    return settings.no_resize_control or settings.control_resolution is not None


def control_size(control: Size, settings: Dataset, step: int) -> Size:
    """Return the size that a control image is brought to, where controls have sizes of their own.

    With `no_resize_control` both sides are rounded down to `step`; with `control_resolution` the
    sides are those of `nearest_size`. With both only an image of a larger area is resized, and no
    other is even rounded.

    Raises:
        SourceError: nothing would be left of it.
    """
    most = settings.control_resolution
    if most is None:
        found = Size(control.width - control.width % step, control.height - control.height % step)
    elif settings.no_resize_control and control.width * control.height <= most.width * most.height:
        return control
    else:
        try:
            found = nearest_size(control, Size(most.width, most.height), step)
        except ZeroDivisionError:
            found = Size(0, 0)
    if min(found) <= 0:
        raise SourceError(
            f"is too narrow for a control image ({control.width} x {control.height} pixels)",
            hint=f"cut it to a shape nearer to a square, {step} pixels wide and high at least",
        )
    return found


def refuse_odd(size: Size, step: int, *, vae: bool) -> None:
    """Refuse a control image that keeps a size of which its network cannot make patches.

    musubi-tuner rounds no size down to `step` where `no_resize_control` and `control_resolution`
    are both set. A VAE leaves out up to 7 pixels of a side; without one nothing is.

    Raises:
        SourceError: a side is longer than a multiple of `step` by more than that.
    """
    width, height = (side - side % step for side in size)
    if max(size.width - width, size.height - height) >= (_VAE_SIDE if vae else 1):
        raise SourceError(
            f"keeps its size of {size.width} x {size.height} pixels, and not in steps of {step}",
            hint=f"cut it to {width} x {height}, or set one of its keys alone: "
            "no_resize_control, control_resolution",
        )


def nearest_size(image: Size, resolution: Size, step: int) -> Size:
    """Return the size of about the resolution's area whose width / height is nearest to an image's.

    Widths are tried from two steps below that of the exact shape to two above, each with the
    largest multiple of `step` that keeps the area; the first of several counts.

    Raises:
        ZeroDivisionError: the exact shape is one of two steps' width, as in the source.
    """
    area, aspect = resolution.width * resolution.height, image.width / image.height
    exact = int(math.sqrt(area * aspect)) // step * step
    widths = [exact + number * step for number in range(-2, 3)]
    sizes = [Size(width, area // width // step * step) for width in widths]
    return min(sizes, key=lambda size: abs(size.width / size.height - aspect))
