"""Bucket sizes, and the placement of an image in a bucket.

Trainers compute both again from an image's size. So every rule repeats the arithmetic of its
source, including the rounding: musubi-tuner's dataset/bucket.py and
`ImageDataset.retrieve_latent_cache_batches` (dataset/image_video_dataset.py); sd-scripts'
`BucketManager` (library/train_util.py) and `make_bucket_resolutions` (library/model_util.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from latentmake.base.errors import SourceError

if TYPE_CHECKING:
    from latentmake.config.datasets import Dataset


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int


class Placement(NamedTuple):
    """Way to bring an image to its target size: resize, then crop.

    Attributes:
        resized: size to resize the image to, in pixels.
        left: left edge of the crop in the resized image.
        top: top edge of the crop in the resized image.
        target: size of the crop.
    """

    resized: Size
    left: int
    top: int
    target: Size


@lru_cache(maxsize=256)
def bucket_sizes(resolution: Size, widths: range, most: int | None = None) -> tuple[Size, ...]:
    """Return the bucket sizes of a resolution, sorted, without duplicates.

    Each width is combined with the largest height, in steps of `widths`, that does not exceed the
    area. Every bucket also occurs with width and height swapped.

    Args:
        resolution: size in pixels, whose area the buckets keep.
        widths: widths of the buckets in pixels. The first one is also the least height.
        most: largest height, for sd-scripts, whose buckets also include the largest square; None
            for musubi-tuner.
    """
    area, step, sizes = resolution.width * resolution.height, widths.step, set[Size]()
    if most is not None:
        side = math.isqrt(area) // step * step
        sizes.add(Size(side, side))
    for width in widths:
        height = min(area // width // step * step, most or area)
        if height >= widths.start:
            sizes |= {Size(width, height), Size(height, width)}
    return tuple(sorted(sizes))


@lru_cache(maxsize=4096)
def nearest_bucket(image: Size, resolution: Size, widths: range, most: int | None = None) -> Size:
    """Return the bucket with the aspect ratio nearest to that of an image; of equals, the first.

    An image that has the size of a bucket belongs to it. For arguments, see `bucket_sizes`.
    """
    sizes, aspect = bucket_sizes(resolution, widths, most), image.width / image.height
    if image in sizes:
        return image
    nearest = min(sizes, key=lambda size: abs(size.width / size.height - aspect), default=None)
    return nearest or resolution  # no bucket is small enough for this resolution


def widths(resolution: Size, step: int, beyond: int) -> range:
    """Return the widths of musubi-tuner's buckets, from s // 2 to s = int(sqrt(area)), by `step`.

    By its rule, they end at s (`beyond` is 1). By its code, they end at the first
    multiple of the step from s on (`beyond` is the step). This may add a pair: 160 x 176 and
    176 x 160 for 160 x 192.
    """
    side = math.isqrt(resolution.width * resolution.height)
    return range(max(side // 2 // step * step, step), side + beyond, step)


def refuse_large(image: Size, most: int, path: str = "") -> None:
    """Raise a SourceError if an image has more than `most` pixels; `path` is for the message."""
    width, height = image
    if width * height > most:
        what = f"has {width} x {height} pixels, more than {most} in all (a decompression bomb?)"
        hint = "scale it down, or raise max_image_pixels of the dataset"
        raise SourceError(what, where=path, hint=hint)


def cover(image: Size, target: Size, limit: int, path: str = "") -> Placement:
    """Return the placement that scales an image to cover its target size and crops the centre.

    The scale is the larger of the two ratios of sides. Scaled sides are rounded to the nearest
    pixel, and the crop begins at (resized - target) // 2.

    Args:
        image: size of the image in pixels.
        target: size to cover in pixels.
        limit: largest number of pixels to scale an image up to.
        path: path of the image, for the message.

    Raises:
        SourceError: the image would be scaled up, and to more than `limit` pixels.
    """
    if image == target:
        return Placement(image, 0, 0, target)
    scale = max(target.width / image.width, target.height / image.height)
    width = max(int(image.width * scale + 0.5), target.width)
    height = max(int(image.height * scale + 0.5), target.height)
    if width * height > max(limit, image.width * image.height):
        raise SourceError(
            f"is too narrow ({image.width} x {image.height}): covering {target.width} x "
            f"{target.height} takes {width * height} pixels",
            where=path,
            hint="crop it to a shape closer to the resolution, or remove it",
        )
    left, top = (width - target.width) // 2, (height - target.height) // 2
    return Placement(Size(width, height), left, top, target)


def shrink(image: Size, resolution: Size, step: int) -> Placement:
    """Return the placement that scales an image down to the resolution's area, if it is larger.

    The sides are then cropped to multiples of `step` pixels. Smaller images are only cropped.

    Raises:
        ValueError: a side would become 0.
    """
    area, aspect = resolution.width * resolution.height, image.width / image.height
    resized = image
    if image.width * image.height > area:
        wide = math.sqrt(area * aspect)
        width, height = _rounded(wide, step), _rounded(area / wide, step)
        # One side becomes a multiple of the step: the one that changes the aspect ratio less.
        other_width, other_height = _rounded(height * aspect, step), _rounded(width / aspect, step)
        if not (other_height and height):
            raise ValueError(f"is too narrow for steps of {step} pixels")
        if abs(width / other_height - aspect) < abs(other_width / height - aspect):
            resized = Size(width, int(width / aspect + 0.5))
        else:
            resized = Size(int(height * aspect + 0.5), height)
    target = Size(resized.width - resized.width % step, resized.height - resized.height % step)
    if not (target.width and target.height):
        raise ValueError(f"is smaller than a step of {step} pixels")
    left, top = (resized.width - target.width) // 2, (resized.height - target.height) // 2
    return Placement(resized, left, top, target)


def _rounded(side: float, step: int) -> int:
    return int(side + 0.5) // step * step


def crop_ltrb(target: Size, image: Size) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of an image that is fitted into its bucket.

    sd-scripts calls this the crop, and passes it to SDXL as a condition.
    """
    aspect = image.width / image.height
    is_wider = target.width / target.height > aspect
    width = target.height * aspect if is_wider else target.width
    height = target.height if is_wider else target.width / aspect
    left, top = (target.width - width) // 2, (target.height - height) // 2
    return left, top, left + width, top + height


def control_size(control: Size, settings: Dataset, step: int) -> Size:
    """Return the size that a control image is scaled to, if controls have sizes of their own.

    Source: `BucketSelector.calculate_bucket_resolution` of musubi-tuner's dataset/bucket.py.

    Args:
        control: size of the control image in pixels.
        settings: the dataset's section of the configuration. With `control_resolution`, the result
            has about its area and the aspect ratio of the image, but with `no_resize_control`, an
            image that is not larger keeps its size. Else sides are rounded down to `step`.
        step: number of pixels of which sides are multiples.

    Raises:
        SourceError: a side would become 0.
    """
    size = Size(control.width // step * step, control.height // step * step)
    if (most := settings.control_resolution) is not None:
        area = most.width * most.height
        if settings.no_resize_control and control.width * control.height <= area:
            return control
        aspect = control.width / control.height
        exact = int(math.sqrt(area * aspect)) // step * step
        widths = [exact + number * step for number in range(-2, 3)]
        try:
            sizes = [Size(width, area // width // step * step) for width in widths]
            size = min(sizes, key=lambda other: abs(other.width / other.height - aspect))
        except ZeroDivisionError:  # as in the source, for a width of at most two steps
            size = Size(0, 0)
    if min(size) <= 0:
        what = f"is too narrow for a control image ({control.width} x {control.height} pixels)"
        hint = f"cut it to a shape nearer to a square, {step} pixels wide and high at least"
        raise SourceError(what, hint=hint)
    return size


def refuse_odd(size: Size, step: int, cut: int) -> None:
    """Refuse a control image that keeps a size which its network cannot split into patches.

    Args:
        size: size of the control image in pixels.
        step: side of a patch in pixels.
        cut: pixels beyond a multiple of `step` that the network ignores.

    Raises:
        SourceError: a side exceeds a multiple of `step` by more than `cut` pixels.
    """
    width, height = (side - side % step for side in size)
    if max(size.width - width, size.height - height) > cut:
        what = f"keeps its size of {size.width} x {size.height} pixels, and not in steps of {step}"
        hint = f"cut it to {width} x {height}, or set one of its keys alone: "
        raise SourceError(what, hint=f"{hint}no_resize_control, control_resolution")
