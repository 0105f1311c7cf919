"""Pixels of images and videos, 0 to 255, as the trainer of each layout would make them.

Each module offers `pixels_of(order, item, data, control, targets)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import WorkItem

__all__ = ["Pixels", "stored_size"]


class Pixels(NamedTuple):
    """Pixels of one target.

    Attributes:
        content: [H, W, 3] of an image, [F, H, W, 3] for Wan.
        original: width and height of the source, in pixels.
        control: pixels of the control, of the same shape.
        clip: whether it is a clip of a video.
        alpha: transparency, [H, W], if it counts.
    """

    content: NDArray[np.uint8]
    original: tuple[int, int]
    control: NDArray[np.uint8] | None = None
    clip: bool = False
    alpha: NDArray[np.uint8] | None = None


def stored_size(item: WorkItem, found: tuple[int, int] | None = None) -> Size:
    """Return the size that an item's image or video had while planning.

    Raises:
        SourceError: another size is `found` now.
    """
    size = None if item.media is None else Size(item.media.width, item.media.height)
    if size is None or (found is not None and found != size):
        raise SourceError(
            "was changed after the build began",
            where=item.source or "",
            mend="give the command again",
        )
    return size
