"""Pictures of a training: curves from TensorBoard's event files, and grids of samples."""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Values = NDArray[np.float64]

# Scalar -> its unit, in the order in which the picture shows them.
_UNITS = {
    "loss": "loss",
    "raw_loss": "loss",
    "validation_loss": "loss",
    "learning_rate": "rate",
    "gradient_norm": "norm",
    "qk_grads_av": "gradient",
    "images_per_second": "images/s",
    "items_per_second": "items/s",
}
_WIDTH, _HEIGHT = 12.0, 2.9  # width of the picture, height of a row, in inches of 100 pixels
_COLUMNS = 2
_AVERAGED = 20  # fewest points of a curve that gets a moving average
_SPAN = 0.04  # share of the curve over which the average reaches back, roughly
_COLOUR = "#1f6feb"
_INK = "#767d86"  # colour of texts and axes, legible on white and on dark pages


def read_curves(events: Path) -> dict[str, tuple[Values, Values]]:
    """Return tag -> steps and values, for all scalars in a folder of event files.

    Scalars that every training writes come first. A file that was cut short is read as far as it
    goes. Points of a resumed training replace earlier points of the same steps.
    """
    # TensorBoard would warn about each point that a resumed training has written again.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = {*accumulator.Tags()["scalars"]}
    curves = {}
    for name in [*(name for name in _UNITS if name in names), *sorted(names - _UNITS.keys())]:
        points = [(point.step, point.value) for point in accumulator.Scalars(name)]
        steps, values = np.array(points, np.float64).T
        curves[name] = steps, np.where(np.isfinite(values), values, np.nan)
    return curves


def smoothed(values: Values) -> Values:
    """Return the exponential moving average [points] of a curve [points]; NaN is skipped."""
    share = 1 / (1 + _SPAN * len(values))

    def average(mean: float, value: float) -> float:
        if np.isnan(mean) or np.isnan(value):
            return mean if np.isnan(value) else value
        return mean + share * (value - mean)

    return np.array([*accumulate(values.tolist(), average)])


def curves_png(events: Path, *, title: str = "") -> bytes | None:
    """Return a PNG, 1200 pixels wide, with the scalars of a folder of event files.

    A loss has two lines: the pale one shows each step, the other one the moving average. The epoch
    is left out, and so is `raw_loss` if it equals the loss. The background is transparent.
    Sub-folders are ignored.

    Returns:
        None if there is nothing to draw.
    """
    curves = read_curves(events) if events.is_dir() else {}
    curves.pop("epoch", None)
    if {"loss", "raw_loss"} <= curves.keys():
        loss, raw = curves["loss"][1], curves["raw_loss"][1]
        if len(loss) == len(raw) and np.allclose(loss, raw, equal_nan=True):
            del curves["raw_loss"]
    if not curves:
        return None
    rows = -(-len(curves) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH, rows * _HEIGHT + 0.6), dpi=100, layout="constrained")
    for number, (name, (steps, values)) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(rows, _COLUMNS, number)
        marker = "o" if len(values) < 3 else None
        if "loss" in name and len(values) >= _AVERAGED:
            axes.plot(steps, values, color=_COLOUR, alpha=0.25, linewidth=0.8)
            values = smoothed(values)
        axes.plot(steps, values, color=_COLOUR, linewidth=1.6, marker=marker)
        # Without `parse_math=False`, a dollar sign in a name would begin a formula.
        heading = axes.set_title(name, loc="left", fontsize=12, fontweight="bold", parse_math=False)
        heading.set_color(_INK)
        axes.set_xlabel("steps", color=_INK)
        axes.set_ylabel(_UNITS.get(name, "loss" if "loss" in name else "value"), color=_INK)
        axes.tick_params(colors=_INK)
        axes.yaxis.get_offset_text().set_color(_INK)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.grid(color=_INK, alpha=0.3, linewidth=0.6)
        axes.spines[:].set_color(_INK)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, color=_INK, parse_math=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", transparent=True, metadata={"Software": None})
    return data.getvalue()


_MARGIN = 8
_FONT_SIZE = 14
_LINE = _FONT_SIZE + 4
_LETTER = 8  # assumed width of a letter, in pixels; most are narrower
_CELL = 128  # pixels; smaller pictures are enlarged by an integer factor
_HEADER_LINES = 4
_LABEL = 24  # most letters in a line of a label
_ABSENT = "#eeeeee"  # colour in place of a missing picture


def draw_grid(
    rows: Sequence[tuple[str, Sequence[Image.Image | None]]], headers: Sequence[str] = ()
) -> Image.Image:
    """Return a grid of pictures as one picture.

    Args:
        rows: (label, pictures) of each row. All pictures have one size; None leaves a grey place.
        headers: headers of the columns.
    """
    width, height = next(picture.size for _, row in rows for picture in row if picture is not None)
    enlarged = max(1, -(-_CELL // max(width, height)))
    width, height = width * enlarged, height * enlarged
    font = ImageFont.load_default(_FONT_SIZE)
    heads = [_wrapped(text, width // _LETTER, _HEADER_LINES) for text in headers]
    labels = [_wrapped(label, _LABEL, max(1, height // _LINE)) for label, _ in rows]
    left = 2 * _MARGIN + round(max(font.getlength(line) for label in labels for line in label))
    top = _MARGIN + (_MARGIN + _LINE * max(map(len, heads)) if heads else 0)
    columns = max(len(row) for _, row in rows)
    size = (left + columns * (width + _MARGIN), top + len(rows) * (height + _MARGIN))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)

    def write(lines: Sequence[str], text_left: int, text_top: int) -> None:
        for number, line in enumerate(lines):
            draw.text((text_left, text_top + number * _LINE), line, fill="black", font=font)

    for column, head in enumerate(heads):
        write(head, left + column * (width + _MARGIN), _MARGIN)
    for number, (label, (_, pictures)) in enumerate(zip(labels, rows, strict=True)):
        row_top = top + number * (height + _MARGIN)
        write(label, _MARGIN, row_top + (height - _LINE * len(label)) // 2)
        for column, picture in enumerate(pictures):
            corner = left + column * (width + _MARGIN), row_top
            if picture is None:
                opposite = corner[0] + width - 1, corner[1] + height - 1
                draw.rectangle((corner, opposite), fill=_ABSENT)
            else:
                grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), corner)
    return grid


def _wrapped(text: str, width: int, lines: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=lines, placeholder="…") or [""]
