"""Random scenes in motion, for the training of the tiny Wan model.

Shapes move, grow or turn over plain, shaded and patterned backgrounds. Waves do not occur.
"""

from __future__ import annotations

import math
import random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.shapes import COLOURS, PATTERNS, SHAPES, Colour, draw_background, fill_mask

Clip: TypeAlias = NDArray[np.uint8]
"""Frames of a clip in RGB, [frames, height, width, 3]."""

_WAYS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_SPEED = 0.035  # movement per frame, as a share of the short side
_GROWTH = 0.05  # growth per frame, as a share of the radius
_TURN = 0.12  # radians per frame
_GROUNDS = (*PATTERNS, "plain", "shaded", "shaded", "shaded")


def draw_motion(dice: random.Random, size: tuple[int, int], frames: int) -> tuple[Clip, str]:
    """Return a random scene in motion and its caption; `size` is width and height."""
    short = min(size)
    first, second, *others = dice.sample(list(COLOURS), 5)
    ground = dice.choice(_GROUNDS)
    if ground == "shaded":
        background = Image.fromarray(_shaded(size, COLOURS[first], COLOURS[second]))
    else:
        period = short * dice.uniform(0.25, 0.6)
        background = draw_background(size, ground, COLOURS[first], COLOURS[second], period)
    images = [background.copy() for _ in range(frames)]
    words = []
    for colour in others[: dice.choice((1, 1, 2, 3))]:
        shape = dice.choice(list(SHAPES))
        act = dice.choice((*_WAYS, *_WAYS, "growing", "turning", "resting"))
        words.append(f"a {colour} {shape} {f'moving {act}' if act in _WAYS else act}")
        left, top = (dice.uniform(0.15, 0.85) * side for side in size)
        radius = short * dice.uniform(0.12, 0.45)
        speed = short * _SPEED * dice.uniform(0.3, 1.2)
        turn = dice.uniform(-math.pi, math.pi)
        for number, image in enumerate(images):
            moment = number - frames / 2
            right, down = _WAYS.get(act, (0, 0))
            place = (left + right * speed * moment, top + down * speed * moment)
            grown = radius * (1 + (act == "growing") * _GROWTH * moment)
            mask = fill_mask(shape, size, place, grown, turn + (act == "turning") * _TURN * moment)
            image.paste(COLOURS[colour], (0, 0), mask)
    behind = first if ground == "plain" else f"{first} and {second} {ground}"
    clip = np.stack([np.asarray(image) for image in images])
    return clip, f"{' and '.join(words)} on a {behind} background"


def _shaded(size: tuple[int, int], top: Colour, bottom: Colour) -> Clip:
    """Return a picture [height, width, 3] with a vertical gradient between two colours."""
    share = np.linspace(0, 1, size[1])[:, None, None]
    column = (1 - share) * np.array(top) + share * np.array(bottom)
    return np.repeat(column, size[0], axis=1).round().astype(np.uint8)
