"""Pictures that look like photographs, and pictures that are hard to scale, drawn from seeds."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
Shape = tuple[int, int]
"""Height and width."""


def encoded(pixels: Pixels | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a file of a picture."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def psnr(one: Pixels, other: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two pictures, in dB."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def clipped(values: NDArray[np.floating[Any]]) -> Pixels:
    """Return values rounded to [H, W, 3] of 8 bits; a plane becomes grey."""
    found = np.clip(values + 0.5, 0, 255).astype(np.uint8)
    return found if found.ndim == 3 else np.repeat(found[:, :, None], 3, axis=2)


def clouds(shape: Shape, slope: float = 1.0) -> Pixels:
    """Draw noise whose amplitude falls with frequency as in photographs: 1 / f**slope."""
    dice, (height, width) = np.random.default_rng(1), shape
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(down, across)
    frequency[0, 0] = 1
    planes = []
    for _ in range(3):
        noise = np.fft.rfft2(dice.standard_normal(shape)) / frequency**slope
        plane = np.fft.irfft2(noise, shape)
        planes.append(plane / plane.std())
    grey, red, blue = planes
    return clipped(128 + 50 * np.stack([grey + 0.3 * red, grey, grey + 0.3 * blue], axis=-1))


def leaves(shape: Shape, grain: float = 6.0) -> Pixels:
    """Draw overlapping leaves of all sizes and saturated colours, in uneven light, with grain."""
    dice, (height, width) = np.random.default_rng(2), shape
    image = Image.new("RGB", (width, height), (90, 110, 130))
    draw = ImageDraw.Draw(image)
    for _ in range(width * height // 2000):
        side, x, y = 6 / (dice.random() + 0.012), dice.random() * width, dice.random() * height
        red, green, blue = dice.integers(0, 256, 3).tolist()
        box = (x - side, y - 0.7 * side, x + side, y + 0.7 * side)
        draw.ellipse(box, fill=(red, green, blue))
    light = np.linspace(0.6, 1, width)[None, :, None]
    return clipped(np.asarray(image) * light + dice.normal(0, grain, (*shape, 3)))


def text(shape: Shape, size: int = 14) -> Pixels:
    """Draw a page full of black letters on white."""
    dice, (height, width) = np.random.default_rng(3), shape
    image = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    for top in range(0, height, size * 4 // 3):
        letters = "".join(map(chr, dice.integers(33, 127, 2 * width // size)))
        draw.text((0, top), letters, fill="black", font=font)
    return np.asarray(image)


def zone_plate(shape: Shape, end: float = 1.0) -> Pixels:
    """Draw rings that become finer outwards, up to `end` of the highest frequency."""
    down, across = (np.arange(side) - side / 2 for side in shape)
    radius = down[:, None] ** 2 + across[None] ** 2
    return clipped(127.5 + 127.5 * np.cos(np.pi * end * radius / max(shape)))


def checks(shape: Shape, side: int, colours: tuple[str, ...] = ("black", "white")) -> Pixels:
    """Draw squares of some colours in turn."""
    down, across = (np.arange(length) // side for length in shape)
    palette = np.array([Image.new("RGB", (1, 1), each).getpixel((0, 0)) for each in colours])
    return clipped(palette[(down[:, None] + across[None]) % len(colours)].astype(float))


def gradients(shape: Shape) -> Pixels:
    """Draw a slow change of colours from corner to corner."""
    down, across = (np.linspace(0, 255, length) for length in shape)
    planes = np.broadcast_arrays(across[None], down[:, None], (down[:, None] + across[None]) / 2)
    return clipped(np.stack(planes, axis=-1))


def noise(shape: Shape) -> Pixels:
    """Draw pixels that have nothing to do with each other."""
    return np.random.default_rng(4).integers(0, 256, (*shape, 3), np.uint8)


def salt(shape: Shape) -> Pixels:
    """Draw pixels that are black or white."""
    return clipped(255.0 * (np.random.default_rng(5).random(shape) < 0.5))


PRIMARIES = ("red", "lime", "blue")
PHOTOGRAPHS: dict[str, Callable[[Shape], Pixels]] = {
    "clouds": clouds,
    "leaves": leaves,
    "grainy leaves": lambda shape: leaves(shape, grain=20.0),
}
HARD: dict[str, Callable[[Shape], Pixels]] = {
    "letters": text,
    "large letters": lambda shape: text(shape, size=40),
    "zone plate": zone_plate,
    "slow zone plate": lambda shape: zone_plate(shape, end=0.2),
    "checks of 1": lambda shape: checks(shape, 1),
    "checks of 3": lambda shape: checks(shape, 3),
    "checks of 13": lambda shape: checks(shape, 13),
    "primaries of 2": lambda shape: checks(shape, 2, PRIMARIES),
    "primaries of 7": lambda shape: checks(shape, 7, PRIMARIES),
    "gradients": gradients,
    "rough clouds": lambda shape: clouds(shape, slope=0.5),
    "noise": noise,
    "salt": salt,
}
