"""Ways of decoding and scaling a JPEG: processor time and distance from Lanczos over all of it.

    python tests/bench/pixels.py [--width 1536] [--sizes 64 96] [--rounds 5]

Each way makes every size (the shorter side) of the same JPEGs, which it decodes as rarely as it
can. Printed: the processor time of a file of leaves, as a ratio to the first way's, which is that
of the plain layout (the least of rounds in which all take turns); and the lowest PSNR of drawn
photographs and of hard pictures (`tests/worlds/picture_world.py`), 4:4:4 and 4:2:0, against
decoding in full and Pillow's Lanczos. pyvips and simplejpeg are compared where they are installed;
no environment of this project has them.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["VIPS_CONCURRENCY"] = os.environ["OMP_NUM_THREADS"] = "1"

import cv2
import numpy as np
from PIL import Image
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "worlds")]

from latentmake.caches.pixels.plain import by_pillow, lanczos  # noqa: E402
from latentmake.geometry.buckets import Size  # noqa: E402
from picture_world import HARD, PHOTOGRAPHS, Pixels, Shape, encoded, leaves, psnr  # noqa: E402

Way = Callable[[bytes, Sequence[Size]], list[Pixels]]
LANCZOS = Image.Resampling.LANCZOS


def opened(data: bytes) -> Image.Image:
    """Decode a file in full."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def by_torch(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
    """As the plain layout does where no fraction will do."""
    pixels = np.asarray(opened(data))
    return [np.ascontiguousarray(lanczos(pixels, size)[..., :3]) for size in sizes]


def pillow(gap: float | None) -> Way:
    """Return Pillow's Lanczos, after averaging to `gap` times the size."""

    def make(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
        image = opened(data)
        return [np.array(image.resize(size, LANCZOS, reducing_gap=gap)) for size in sizes]

    return make


def draft(gap: float, *, torch: bool) -> Way:
    """Return decoding at 1/2, 1/4 or 1/8, `gap` times the size or more, and Lanczos."""

    def make(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
        decoded: dict[int, tuple[Image.Image, tuple[float, float, float, float]]] = {}
        arrays: dict[int, Pixels] = {}
        found = []
        for size in sizes:
            image = Image.open(io.BytesIO(data))
            room = min(image.width / size.width, image.height / size.height) / gap
            scale = max(each for each in (1, 2, 4, 8) if each <= max(room, 1))
            if scale not in decoded:
                box = (0.0, 0.0, image.width / scale, image.height / scale)
                image.draft("RGB", (image.width // scale, image.height // scale))
                image.load()
                decoded[scale] = image, box
                arrays[scale] = np.asarray(image) if torch else np.empty(0, np.uint8)
            image, box = decoded[scale]
            if torch:
                found.append(np.ascontiguousarray(lanczos(arrays[scale], size)[..., :3]))
            else:
                found.append(np.array(image.resize(size, LANCZOS, box=box)))
        return found

    return make


def opencv(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
    """OpenCV's area averaging to twice the size, and its Lanczos, which averages nothing."""
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    assert pixels is not None
    found = []
    for width, height in sizes:
        doubled = cv2.resize(pixels, (2 * width, 2 * height), interpolation=cv2.INTER_AREA)
        scaled = cv2.resize(doubled, (width, height), interpolation=cv2.INTER_LANCZOS4)
        found.append(np.asarray(scaled, np.uint8))
    return found


def bicubic(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
    """torch's antialiased bicubic filter."""
    import torch

    planes = torch.from_numpy(np.array(opened(data))).permute(2, 0, 1)[None]
    return [
        torch.nn.functional.interpolate(planes, size[::-1], mode="bicubic", antialias=True)[0]
        .permute(1, 2, 0)
        .numpy()
        for size in sizes
    ]


def simplejpeg(module: Any) -> Way:
    """Return libjpeg-turbo's decoding to an array, and torch's Lanczos."""

    def make(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
        pixels = module.decode_jpeg(data)
        return [np.ascontiguousarray(lanczos(pixels, size)) for size in sizes]

    return make


def vips(module: Any, gap: float) -> Way:
    """Return vips' Lanczos, after shrinking while it decodes to `gap` times the size."""

    def make(data: bytes, sizes: Sequence[Size]) -> list[Pixels]:
        found = []
        for size in sizes:
            width = module.Image.new_from_buffer(data, "").width
            room = width / size.width / gap
            scale = max(each for each in (1, 2, 4, 8) if each <= max(room, 1))
            image = module.Image.new_from_buffer(data, "", shrink=scale)
            ratios = size.width / image.width, size.height / image.height
            found.append(image.resize(ratios[0], vscale=ratios[1], gap=0).numpy())
        return found

    return make


def ways() -> dict[str, Way]:
    """Return the ways that can be tried here, by name; the first is the plain layout's."""
    found = {
        "Pillow, draft 6, torch": draft(6, torch=True),
        "Pillow in full, torch's Lanczos": by_torch,
        "Pillow alone": pillow(None),
        **{f"Pillow, reducing_gap {gap}": pillow(gap) for gap in (3, 6)},
        **{f"Pillow, draft {gap}": draft(gap, torch=False) for gap in (3, 6)},
        "Pillow, draft 3, torch": draft(3, torch=True),
        "Pillow, torch's bicubic": bicubic,
        "OpenCV": opencv,
    }
    for name, way in (
        ("simplejpeg", lambda module: {"simplejpeg, torch's Lanczos": simplejpeg(module)}),
        ("pyvips", lambda module: {f"pyvips, shrink {gap}": vips(module, gap) for gap in (3, 6)}),
    ):
        try:
            found |= way(importlib.import_module(name))
        except ImportError:
            sys.stderr.write(f"{name} is not installed\n")
    return found


def lowest(
    tried: dict[str, Way],
    draws: dict[str, Callable[[Shape], Pixels]],
    shape: Shape,
    sizes: Sequence[Size],
) -> dict[str, str]:
    """Return the lowest PSNR of each way, and the picture it is of."""
    found: dict[str, list[tuple[float, str]]] = {way: [] for way in tried}
    for name, draw in draws.items():
        pixels = draw(shape)
        for subsampling in (0, 2):
            data = encoded(pixels, quality=95, subsampling=subsampling)
            wanted = [by_pillow(np.asarray(opened(data)), size) for size in sizes]
            for way, make in tried.items():
                made = zip(make(data, sizes), wanted, strict=True)
                found[way] += [(psnr(one, other), name) for one, other in made]
    least = {way: min(values) for way, values in found.items()}
    return {way: f"{value:.0f} ({name})" for way, (value, name) in least.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    sizes = [Size(side * 4 // 3, side) for side in arguments.sizes]
    width, height = arguments.width, arguments.width * 3 // 4
    data = encoded(leaves((height, width)), quality=90)
    tried = ways()
    spent = dict.fromkeys(tried, float("inf"))
    for _ in range(arguments.rounds):
        for name, way in tried.items():
            way(data, sizes)
            began = time.process_time()
            for _ in range(5):
                way(data, sizes)
            spent[name] = min(spent[name], (time.process_time() - began) / 5)
    first = next(iter(spent.values()))
    drawn = [lowest(tried, draws, (height, width), sizes) for draws in (PHOTOGRAPHS, HARD)]
    rows = [(name, f"{spent[name] / first:.2f}", *(each[name] for each in drawn)) for name in tried]
    sys.stdout.write(f"{width} x {height} to {arguments.sizes}: {first * 1e3:.1f} ms\n")
    head = ["way", "processor time", "photographs, dB", "hard pictures, dB"]
    sys.stdout.write(tabulate(rows, head, tablefmt="github", disable_numparse=True) + "\n")


if __name__ == "__main__":
    main()
