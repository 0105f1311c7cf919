"""Antialiased shapes and backgrounds, and scenes of one shape.

A shape is a set of closed contours around the origin with radius 1. Masks are drawn at four times
their size and reduced.
"""

from __future__ import annotations

import math
import random
from typing import TypeAlias

from PIL import Image, ImageDraw

Colour: TypeAlias = tuple[int, int, int]
Contour: TypeAlias = list[tuple[float, float]]

_OVERSAMPLING = 4

COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (252, 211, 40),
    "green": (46, 150, 70),
    "teal": (20, 150, 160),
    "blue": (40, 90, 210),
    "purple": (120, 60, 170),
    "pink": (240, 130, 180),
    "brown": (125, 80, 45),
    "grey": (140, 144, 150),
    "white": (245, 245, 240),
    "black": (28, 28, 32),
}

PATTERNS: tuple[str, ...] = ("plain", "striped", "dotted", "checked")


def _polygon(corners: int, radius: float = 1.0, start: float = -math.pi / 2) -> Contour:
    angles = [start + 2 * math.pi * corner / corners for corner in range(corners)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _star(points: int, inner: float) -> Contour:
    outside = _polygon(points)
    inside = _polygon(points, inner, -math.pi / 2 + math.pi / points)
    return [corner for pair in zip(outside, inside, strict=True) for corner in pair]


def _moon() -> Contour:
    """Return a disc minus a smaller disc on its right; both circles pass through the two tips."""
    tip = math.radians(55)
    outside = [tip + step / 60 * (2 * math.pi - 2 * tip) for step in range(61)]
    outer = [(math.cos(angle), math.sin(angle)) for angle in outside]
    centre = 0.62
    radius = math.hypot(math.cos(tip) - centre, math.sin(tip))
    bend = math.atan2(math.sin(tip), math.cos(tip) - centre)
    inside = [-bend - step / 40 * (2 * math.pi - 2 * bend) for step in range(1, 40)]
    return outer + [
        (centre + radius * math.cos(angle), radius * math.sin(angle)) for angle in inside
    ]


def _heart() -> Contour:
    """Return the curve 16 sin^3 t, 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled to radius 1."""
    contour = []
    for step in range(80):
        t = 2 * math.pi * step / 80
        height = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        contour.append((16 * math.sin(t) ** 3 / 17, -(height + 2.5) / 17))
    return contour


_ARM = 0.36
_CROSS: Contour = [
    (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
    (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
]  # fmt: skip
_ARROW: Contour = [
    (0, -1), (0.75, -0.1), (0.3, -0.1), (0.3, 1), (-0.3, 1), (-0.3, -0.1), (-0.75, -0.1),
]  # fmt: skip
_TOWER: Contour = [
    (-0.5, -1), (-0.25, -1), (-0.25, -0.75), (-0.12, -0.75), (-0.12, -1), (0.12, -1),
    (0.12, -0.75), (0.25, -0.75), (0.25, -1), (0.5, -1), (0.5, -0.4), (0.38, -0.4),
    (0.38, 0.6), (0.6, 1), (-0.6, 1), (-0.38, 0.6), (-0.38, -0.4), (-0.5, -0.4),
]  # fmt: skip

# The first contour is filled, the others are cut out of it.
SHAPES: dict[str, tuple[Contour, ...]] = {
    "circle": (_polygon(72),),
    "square": (_polygon(4, 1.15, -math.pi / 4),),
    "triangle": (_polygon(3, 1.1),),
    "star": (_star(5, 0.45),),
    "ring": (_polygon(72), _polygon(72, 0.52)),
    "cross": (_CROSS,),
    "heart": (_heart(),),
    "diamond": ([(0, -1.1), (0.72, 0), (0, 1.1), (-0.72, 0)],),
    "hexagon": (_polygon(6),),
    "moon": (_moon(),),
    "arrow": (_ARROW,),
    "tower": (_TOWER,),
}


def _placed(
    contour: Contour, centre: tuple[float, float], radius: float, turn: float
) -> list[tuple[int, int]]:
    cosine, sine = math.cos(turn), math.sin(turn)
    return [
        (
            round(_OVERSAMPLING * (centre[0] + radius * (right * cosine - down * sine))),
            round(_OVERSAMPLING * (centre[1] + radius * (right * sine + down * cosine))),
        )
        for right, down in contour
    ]


def _canvas(size: tuple[int, int]) -> Image.Image:
    return Image.new("L", (size[0] * _OVERSAMPLING, size[1] * _OVERSAMPLING), 0)


def fill_mask(
    shape: str,
    size: tuple[int, int],
    centre: tuple[float, float],
    radius: float,
    turn: float = 0.0,
) -> Image.Image:
    """Return the coverage of a filled shape: an `L` picture with values from 0 to 255.

    Args:
        shape: key of `SHAPES`.
        size: width and height in pixels.
        centre: centre of the shape in pixels.
        radius: radius of the shape in pixels.
        turn: clockwise rotation in radians.
    """
    canvas = _canvas(size)
    draw = ImageDraw.Draw(canvas)
    outer, *holes = SHAPES[shape]
    draw.polygon(_placed(outer, centre, radius, turn), fill=255)
    for hole in holes:
        draw.polygon(_placed(hole, centre, radius, turn), fill=0)
    return canvas.reduce(_OVERSAMPLING)


def _stripes_mask(size: tuple[int, int], period: float) -> Image.Image:
    """Return the coverage of stripes at 45 degrees that repeat every `period` pixels of width."""
    canvas = _canvas(size)
    draw = ImageDraw.Draw(canvas)
    width, height = canvas.size
    step = max(2.0, period * _OVERSAMPLING)
    for number in range(math.ceil((width + height) / step)):
        left = number * step - height
        draw.polygon(
            [
                (left, height),
                (left + height, 0),
                (left + height + step / 2, 0),
                (left + step / 2, height),
            ],
            fill=255,
        )
    return canvas.reduce(_OVERSAMPLING)


def _dots_mask(size: tuple[int, int], period: float) -> Image.Image:
    canvas = _canvas(size)
    draw = ImageDraw.Draw(canvas)
    step = max(2.0, period * _OVERSAMPLING)
    radius = step * 0.27
    for row in range(math.ceil(canvas.height / step) + 1):
        for column in range(math.ceil(canvas.width / step) + 1):
            right, down = (column + 0.5 * (row % 2)) * step, (row + 0.5) * step
            draw.ellipse((right - radius, down - radius, right + radius, down + radius), fill=255)
    return canvas.reduce(_OVERSAMPLING)


def _checks_mask(size: tuple[int, int], period: float) -> Image.Image:
    canvas = _canvas(size)
    draw = ImageDraw.Draw(canvas)
    side = max(2.0, period * _OVERSAMPLING / 2)
    for row in range(math.ceil(canvas.height / side)):
        for column in range(row % 2, math.ceil(canvas.width / side), 2):
            draw.rectangle(
                (column * side, row * side, (column + 1) * side - 1, (row + 1) * side - 1), fill=255
            )
    return canvas.reduce(_OVERSAMPLING)


def draw_background(
    size: tuple[int, int], pattern: str, first: Colour, second: Colour, period: float
) -> Image.Image:
    """Return an `RGB` background with one of `PATTERNS`; `plain` uses only the colour `first`.

    The other patterns repeat every `period` pixels.
    """
    background = Image.new("RGB", size, first)
    if pattern == "plain":
        return background
    masks = {"striped": _stripes_mask, "dotted": _dots_mask, "checked": _checks_mask}
    background.paste(second, (0, 0), masks[pattern](size, period))
    return background


def draw_scene(dice: random.Random, size: tuple[int, int]) -> tuple[Image.Image, str]:
    """Return a random scene as an `RGB` picture, and its caption; `size` is width and height.

    The scene shows one figure in the middle of a background. Its shape and all colours are random.
    """
    colour, first, second = dice.sample(list(COLOURS), 3)
    pattern = dice.choice(("plain", "plain", "plain", *PATTERNS))
    shape = dice.choice(list(SHAPES))
    short = 0.75 * min(size)
    image = draw_background(size, pattern, COLOURS[first], COLOURS[second], short / 5)
    # A small model learns shapes faster if all figures have about the same place and rotation.
    centre = [side * (0.5 + dice.uniform(-0.015, 0.015)) for side in size]
    turn = 0.0 if shape in ("arrow", "tower", "heart") else dice.uniform(-0.05, 0.05)
    mask = fill_mask(shape, size, (centre[0], centre[1]), short * dice.uniform(0.34, 0.4), turn)
    image.paste(COLOURS[colour], (0, 0), mask)
    pose = " pointing up" if shape == "arrow" else ""
    ground = first if pattern == "plain" else f"{first} and {second} {pattern}"
    return image, f"{with_article(colour)} {shape}{pose} on {with_article(ground)} background"


def with_article(words: str) -> str:
    """Return words with `a` or `an` before them."""
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"
