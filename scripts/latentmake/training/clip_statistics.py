"""Figures of a clip's frames: how much moves, how bright and coloured it is, how far it drifts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709, of the values as they are stored


class ClipFigures(BaseModel):
    """Figures of one clip, in levels from 0 to 255.

    Attributes:
        temporal_difference: mean absolute difference between a frame and the next; None of one
            frame.
        first_to_last: mean absolute difference between the first frame and the last; None of one.
        brightness: mean over all pixels of the BT.709 luma of red, green and blue.
        brightness_deviation: standard deviation of that.
        red: mean of the channel.
        green: mean of the channel.
        blue: mean of the channel.
        colour_deviation: mean over the pixels of the standard deviation of red, green and blue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    temporal_difference: float | None
    first_to_last: float | None
    brightness: float
    brightness_deviation: float
    red: float
    green: float
    blue: float
    colour_deviation: float


WORDS = {
    "temporal_difference": (
        "temporal difference",
        "Mean absolute difference between a frame and the next. Far below the real clips: the "
        "clip stands still. Far above: it flickers.",
    ),
    "first_to_last": (
        "first to last frame",
        "Mean absolute difference between the first frame and the last.",
    ),
    "brightness": ("brightness", "Mean brightness of all pixels."),
    "brightness_deviation": (
        "contrast",
        "Standard deviation of the brightness over all pixels.",
    ),
    "red": ("red", "Mean of the red channel."),
    "green": ("green", "Mean of the green channel."),
    "blue": ("blue", "Mean of the blue channel."),
    "colour_deviation": (
        "colourfulness",
        "Mean difference of a pixel's red, green and blue, as a standard deviation. 0 is grey.",
    ),
}
"""Figure -> its name on a page, and what it tells."""


def figures_of(frames: Iterable[NDArray[np.uint8]]) -> ClipFigures:
    """Return the figures of a clip.

    Args:
        frames: each [H, W, 3], 0 to 255, all of one size.

    Raises:
        ValueError: there is no frame.
    """
    import numpy as np

    first: NDArray[np.float64] | None = None
    last: NDArray[np.float64] | None = None
    count, moved, squares, brightness, colour = 0, 0.0, 0.0, 0.0, 0.0
    channels = np.zeros(3)
    for frame in frames:
        now = frame.astype(np.float64)
        if last is None:
            first = now
        else:
            moved += float(np.abs(now - last).mean())
        luma = now @ np.array(_LUMA)
        brightness += float(luma.mean())
        squares += float((luma**2).mean())
        colour += float(now.std(axis=2).mean())
        channels += now.mean(axis=(0, 1))
        last = now
        count += 1
    if first is None or last is None:
        raise ValueError("a clip has no frame")
    mean = brightness / count
    red, green, blue = (float(each) for each in channels / count)
    several = count > 1
    return ClipFigures(
        temporal_difference=moved / (count - 1) if several else None,
        first_to_last=float(np.abs(last - first).mean()) if several else None,
        brightness=mean,
        brightness_deviation=max(0.0, squares / count - mean**2) ** 0.5,
        red=red,
        green=green,
        blue=blue,
        colour_deviation=colour / count,
    )


def mean_of(clips: Iterable[ClipFigures]) -> dict[str, float | None]:
    """Return the mean of each figure over some clips; None where no clip has it."""
    found = list(clips)
    means: dict[str, float | None] = {}
    for name in ClipFigures.model_fields:
        values = [value for each in found if (value := getattr(each, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means
