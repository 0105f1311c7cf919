"""Sizes that control images are brought to, where these are not the bucket of their item.

Source: musubi-tuner, `ImageDataset.retrieve_latent_cache_batches` (dataset/image_video_dataset.py)
and `BucketSelector.calculate_bucket_resolution` (dataset/bucket.py).
"""

from __future__ import annotations

import math

from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size

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
