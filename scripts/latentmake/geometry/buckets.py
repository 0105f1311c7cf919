"""Bucket sizes, and the placement of an image in one.

Trainers compute both anew from an image's size, so each rule is the very arithmetic of its source,
rounding included: musubi-tuner's dataset/bucket.py and `ImageDataset.retrieve_latent_cache_batches`
(dataset/image_video_dataset.py); sd-scripts' `BucketManager` (library/train_util.py) and
`make_bucket_resolutions` (library/model_util.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

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


@lru_cache(maxsize=256)
def bucket_sizes(resolution: Size, widths: range, most: int | None = None) -> tuple[Size, ...]:
    """Return the bucket sizes of a resolution, sorted, none twice.

    Each width goes with the largest multiple of their step that keeps the area, in both orders.

    Args:
        resolution: its area is what all buckets come near to, in pixels.
        widths: in pixels; the first is the least height too.
        most: for sd-scripts, the largest height; its buckets include the largest square.
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
    """Return the bucket with the width / height nearest to an image's, the first of several.

    An image of a bucket's size is in that bucket. Arguments are those of `bucket_sizes`.
    """
    sizes, aspect = bucket_sizes(resolution, widths, most), image.width / image.height
    if image in sizes:
        return image
    nearest = min(sizes, key=lambda size: abs(size.width / size.height - aspect), default=None)
    return nearest or resolution  # of fewer pixels than the smallest bucket has


def widths(resolution: Size, step: int, beyond: int) -> range:
    """Return the widths of musubi-tuner's buckets.

    With s = int(sqrt(area)) they go from s // 2, rounded down to the step, up to s by its rule, and
    by its code to the first multiple of the step from s on (`beyond` is the step then). This may
    add a pair: 160 x 176 and 176 x 160 for 160 x 192.
    """
    side = math.isqrt(resolution.width * resolution.height)
    return range(max(side // 2 // step * step, step), side + beyond, step)


def refuse_large(image: Size, most: int, path: str = "") -> None:
    """Refuse an image of more than `most` pixels, by a SourceError in which `path` names it."""
    width, height = image
    if width * height > most:
        what = f"has {width} x {height} pixels, more than {most} in all (a decompression bomb?)"
        hint = "scale it down, or raise max_image_pixels of the dataset"
        raise SourceError(what, where=path, hint=hint)


def cover(image: Size, target: Size, limit: int, path: str = "") -> Placement:
    """Return how an image covers its target size: scaled up or down to cover, centre kept.

    The scale is the larger of the two sides' ratios; sides are rounded to the nearest pixel and
    the cut begins at (resized - target) // 2.

    Raises:
        SourceError: it would be scaled up to more pixels than it has and than `limit`; `path` names
            it.
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
    """Return how an image is made smaller to the resolution's area, if it has more than that.

    It is cut to multiples of `step`.

    Raises:
        ValueError: nothing would be left of it.
    """
    area, aspect = resolution.width * resolution.height, image.width / image.height
    resized = image
    if image.width * image.height > area:
        wide = math.sqrt(area * aspect)
        width, height = _rounded(wide, step), _rounded(area / wide, step)
        # One side becomes a multiple of the steps: that which leaves the aspect more as it was.
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
    """Return where an image lies when it is fitted inside its bucket: left, top, right, bottom.

    sd-scripts calls this the crop, and hands it to SDXL.
    """
    aspect = image.width / image.height
    is_wider = target.width / target.height > aspect
    width = target.height * aspect if is_wider else target.width
    height = target.height if is_wider else target.width / aspect
    left, top = (target.width - width) // 2, (target.height - height) // 2
    return left, top, left + width, top + height


def control_size(control: Size, area: int | None, step: int, *, keeps: bool) -> Size:
    """Return the size that a control image is brought to, where controls have sizes of their own.

    Source: `BucketSelector.calculate_bucket_resolution` of musubi-tuner's dataset/bucket.py.

    Args:
        control: its own size.
        area: of the dataset's `control_resolution`, in pixels; sides get about this area and the
            image's shape. Without it, they are rounded down to `step`.
        step: sides are multiples of this, in pixels.
        keeps: `no_resize_control`; with an `area`, an image that has no more keeps its size.

    Raises:
        SourceError: nothing would be left of it.
    """
    found = Size(control.width // step * step, control.height // step * step)
    if area is not None:
        if keeps and control.width * control.height <= area:
            return control
        aspect = control.width / control.height
        exact = int(math.sqrt(area * aspect)) // step * step
        widths = [exact + number * step for number in range(-2, 3)]
        try:
            sizes = [Size(width, area // width // step * step) for width in widths]
            found = min(sizes, key=lambda size: abs(size.width / size.height - aspect))
        except ZeroDivisionError:  # as in the source: the exact shape is two steps wide at most
            found = Size(0, 0)
    if min(found) <= 0:
        what = f"is too narrow for a control image ({control.width} x {control.height} pixels)"
        hint = f"cut it to a shape nearer to a square, {step} pixels wide and high at least"
        raise SourceError(what, hint=hint)
    return found


def refuse_odd(size: Size, step: int, cut: int) -> None:
    """Refuse a control image that keeps a size of which its network cannot make patches.

    Raises:
        SourceError: a side is longer than a multiple of `step` by more than `cut` pixels, which the
            network leaves out.
    """
    width, height = (side - side % step for side in size)
    if max(size.width - width, size.height - height) > cut:
        what = f"keeps its size of {size.width} x {size.height} pixels, and not in steps of {step}"
        hint = f"cut it to {width} x {height}, or set one of its keys alone: "
        raise SourceError(what, hint=f"{hint}no_resize_control, control_resolution")
