"""Training of a run for its report: loss curves and sample pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentmake.errors import SourceError
from latentmake.files.frames import frames_at, probe_videos
from latentmake.plan.parts import run_folder
from latentmake.reports.comparison import PLAYED, index_of
from latentmake.reports.images import decoded, embedded
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.curves import Curve, is_noisy, read_curves, smoothed

__all__ = ["training_section"]

_POINTS = 400  # of a curve
_STEPS, _PROMPTS = 6, 8  # sample pictures on the page
_SIDE = 384  # pixels of a sample picture at most
_PIXELS = 3_000_000  # of all sample pictures: a page of 10,000 items has room for 1 MB of them
_SMALL = 128  # pixels; smaller pictures are embedded without loss
_DIGITS = 5
_EVENTS = "events.out.tfevents*"

Values = NDArray[np.float64]


class _Facts(JsonFile, extra="ignore"):
    """What a training's record tells, whichever trainer wrote it."""

    steps: int | None = None
    seconds: float | None = None
    loss_start: float | None = None
    loss_end: float | None = None


def training_section(run: str, say: Callable[[str], object]) -> dict[str, Any] | None:
    """Return curves and sample pictures of a run's training; None where it was never trained.

    Args:
        run: its name.
        say: receives pictures that cannot be shown.
    """
    folder = run_folder(run)
    facts = _Facts.read(folder / "training.json")
    curves = [_points(curve) for curve in _curves(folder)]
    samples = _samples(run, say)
    if facts is None and not curves and samples is None:
        return None
    return {
        "facts": {} if facts is None else facts.model_dump(exclude_none=True),
        "curves": curves,
        "samples": samples,
    }


def _curves(folder: Path) -> list[Curve]:
    """Return the curves of the newest folder of TensorBoard's files below a run's folder."""
    files = sorted(folder.rglob(_EVENTS), key=lambda path: path.stat().st_mtime)
    for place in dict.fromkeys(path.parent for path in reversed(files)):
        if curves := [curve for curve in read_curves(place) if len(curve.steps)]:
            return curves
    return []


def _points(curve: Curve) -> dict[str, Any]:
    """Return a curve of at most some hundred points, each the mean of a stretch."""
    average = smoothed(curve.values) if is_noisy(curve.values) else None
    edges = np.linspace(0, len(curve.steps), min(_POINTS, len(curve.steps)) + 1).astype(int)
    return {
        "name": curve.name,
        "steps": [int(curve.steps[end - 1]) for end in edges[1:]],
        "values": _means(curve.values, edges),
        "average": None if average is None else [_rounded(average[end - 1]) for end in edges[1:]],
    }


def _means(values: Values, edges: NDArray[np.int64]) -> list[float | None]:
    found = []
    for start, end in pairwise(edges):
        finite = values[start:end][np.isfinite(values[start:end])]
        found.append(_rounded(finite.mean()) if len(finite) else None)
    return found


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _samples(run: str, say: Callable[[str], object]) -> dict[str, Any] | None:
    """Return the sample pictures of the present weights; of many steps and prompts, some."""
    index = index_of(run)
    if index is None:
        return None
    rows = _spread(len(index.steps), _STEPS)
    shown = index.prompts[:_PROMPTS]
    side = min(_SIDE, math.isqrt(_PIXELS // (len(rows) * len(shown))))
    pictures: list[list[dict[str, Any] | None]] = []
    for row in rows:
        pictures.append([])
        for name in index.files[row][: len(shown)]:
            path = None if name is None else run_folder(run) / "samples" / name
            try:
                pictures[-1].append(None if path is None else _picture(path, side))
            except (SourceError, OSError) as error:
                say(f"not shown: {path}: {error}")
                pictures[-1].append(None)
    return {
        "prompts": shown,
        "steps": [index.steps[row] for row in rows],
        "pictures": pictures,
        "total": [len(index.steps), len(index.prompts)],
    }


def _spread(count: int, most: int) -> Sequence[int]:
    """Return numbers below `count`, evenly spread, with the first and the last."""
    if count <= most:
        return range(count)
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]


def _picture(path: Path, side: int) -> dict[str, Any]:
    """Return a picture of at most `side` pixels for the page; of a clip its middle frame."""
    if path.suffix.lower() in PLAYED:
        (media,) = probe_videos([str(path)])
        if isinstance(media, SourceError):
            raise media
        (_, frame), *_ = frames_at(str(path), [media.frames // 2])
        image = Image.fromarray(frame)
    else:
        image = decoded(path.read_bytes(), path)
    small = max(image.size) <= _SMALL
    if small:
        uri = embedded(image, "png", optimize=True)
    else:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        uri = embedded(image, "webp", quality=80, method=4)
    return {"source": uri, "width": image.width, "height": image.height, "pixels": small}
