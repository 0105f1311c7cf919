"""Bucket sizes and placements of sd-scripts.

Its trainer computes bucket and placement anew from an image's size and does not look at the shapes
of cached latents, so the very same arithmetic is needed, rounding included.
Source: sd-scripts, library/train_util.py, `BucketManager`, and library/model_util.py,
`make_bucket_resolutions`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from latentmake.config.architectures import ARCHITECTURES, ArchitectureName
from latentmake.config.datasets import Bucketing, Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Placement, Size, refuse_narrow
from latentmake.geometry.buckets import place as covering


@lru_cache(maxsize=256)
def bucket_sizes(resolution: Size, buckets: Bucketing) -> tuple[Size, ...]:
    """Return the buckets of a resolution, sorted, none twice.

    A square whose sides are the root of the area rounded down to the steps; and for each width from
    the smallest side to the largest the largest height that keeps the area, in both orders.
    """
    step, _, least, most = buckets
    area = resolution.width * resolution.height
    side = int(math.sqrt(area) // step) * step
    sizes = {Size(side, side)}
    for width in range(least, most + 1, step):
        height = min(most, area // width // step * step)
        if height >= least:
            sizes |= {Size(width, height), Size(height, width)}
    return tuple(sorted(sizes))


def placement(
    image: Size, resolution: Size, dataset: Dataset, architecture: ArchitectureName, path: str = ""
) -> Placement:
    """Return how an image is brought to its size, by a dataset's `fit` and buckets.

    Raises:
        SourceError: nothing would be left of it, or see `refuse_narrow`.
    """
    buckets = dataset.bucketing(ARCHITECTURES[architecture]) if dataset.fit == "bucket" else None
    try:
        found = place(image, resolution, buckets)
    except ValueError as error:
        raise SourceError(
            f"{error} ({image.width} x {image.height})",
            where=path,
            hint="remove it, or leave out the dataset's `bucket_no_upscale`",
        ) from None
    refuse_narrow(image, found, dataset.max_image_pixels, path)
    return found


@lru_cache(maxsize=4096)
def place(image: Size, resolution: Size, buckets: Bucketing | None) -> Placement:
    """Return how sd-scripts brings an image to its size.

    Without buckets (`enable_bucket = false`) it covers the resolution itself.

    Raises:
        ValueError: it is so small or narrow that nothing would be left of it.
    """
    if buckets is None:
        return covering(image, resolution)
    if buckets.bucket_no_upscale:
        return _shrunk(image, resolution, buckets.bucket_reso_steps)
    sizes = bucket_sizes(resolution, buckets)
    if image in sizes:
        return covering(image, image)
    aspect = image.width / image.height
    return covering(image, min(sizes, key=lambda size: abs(size.width / size.height - aspect)))


def _shrunk(image: Size, resolution: Size, step: int) -> Placement:
    """Return how an image is made smaller to the resolution's area, if it has more than that."""

    def rounded(side: float) -> int:
        whole = int(side + 0.5)
        return whole - whole % step

    area, aspect = resolution.width * resolution.height, image.width / image.height
    resized = image
    if image.width * image.height > area:
        wide = math.sqrt(area * aspect)
        width, height = rounded(wide), rounded(area / wide)
        # One side becomes a multiple of the steps: that which leaves the aspect more as it was.
        beside_width, beside_height = rounded(width / aspect), rounded(height * aspect)
        if not (beside_width and height):
            raise ValueError(f"is too narrow for steps of {step} pixels")
        if abs(width / beside_width - aspect) < abs(beside_height / height - aspect):
            resized = Size(width, int(width / aspect + 0.5))
        else:
            resized = Size(int(height * aspect + 0.5), height)
    target = Size(resized.width - resized.width % step, resized.height - resized.height % step)
    if not (target.width and target.height):
        raise ValueError(f"is smaller than a step of {step} pixels")
    return _cut(resized, target)


def _cut(resized: Size, target: Size) -> Placement:
    left, top = (resized.width - target.width) // 2, (resized.height - target.height) // 2
    return Placement(resized, max(left, 0), max(top, 0), target)


def crop_ltrb(target: Size, image: Size) -> tuple[float, float, float, float]:
    """Return where an image lies when it is fitted inside its bucket: left, top, right, bottom.

    That is what sd-scripts calls the crop, and hands to SDXL.
    """
    aspect = image.width / image.height
    width: float = target.width
    height: float = target.height
    if target.width / target.height > aspect:
        width = target.height * aspect
    else:
        height = target.width / aspect
    left, top = (target.width - width) // 2, (target.height - height) // 2
    return left, top, left + width, top + height
