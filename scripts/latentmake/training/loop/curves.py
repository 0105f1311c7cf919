"""Curves of a training as one picture, read from TensorBoard's event files."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from latentmake.files import atomic

Values = NDArray[np.float64]

# Scalar -> its unit, in the order of the picture.
_UNITS = {
    "loss": "loss",
    "raw_loss": "loss",
    "learning_rate": "rate",
    "gradient_norm": "norm",
    "qk_grads_av": "gradient",
    "images_per_second": "images/s",
    "items_per_second": "items/s",
    "epoch": "epochs",
}
_DPI = 100
_WIDTH, _HEIGHT = 12.0, 2.9  # inches: of the picture, of one row of curves
_COLUMNS = 2
_NOISY = 0.3  # share of a curve's turning points; noise turns at two points of three
_LEAST = 20  # points; fewer are seen as they are
_SPAN = 0.04  # of the curve that an average reaches back, roughly
_COLOUR = "#1f6feb"


class Curve(NamedTuple):
    """One scalar over the steps of a training.

    Attributes:
        name: its tag.
        steps: [points], ascending.
        values: [points]; some may be NaN or infinite.
    """

    name: str
    steps: Values
    values: Values


def read_curves(events: Path) -> list[Curve]:
    """Return all scalars of a folder of event files, those of every training first.

    A file that was cut short gives what it holds; a resumed training's points replace those it had
    written before.
    """
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    order = {name: number for number, name in enumerate(_UNITS)}
    found = []
    for name in sorted(names, key=lambda name: (order.get(name, len(order)), name)):
        points = accumulator.Scalars(name)
        steps = np.array([point.step for point in points], np.float64)
        values = np.array([point.value for point in points], np.float64)
        found.append(Curve(name, steps, values))
    return found


def is_noisy(values: Values) -> bool:
    """Whether a curve [points] goes up and down so often that its average says more."""
    finite = values[np.isfinite(values)]
    if len(finite) < _LEAST:
        return False
    differences = np.diff(finite)
    turns = np.count_nonzero(differences[1:] * differences[:-1] < 0)
    return bool(turns > _NOISY * (len(finite) - 2))


def smoothed(values: Values) -> Values:
    """Return the moving average [points] of a curve [points], from its past alone.

    An exponential one with the bias correction of Kingma and Ba 2015, section 3
    (https://arxiv.org/abs/1412.6980), as TensorBoard draws it. NaN and infinite values are left
    out, and become NaN.
    """
    keep = 1 - 1 / max(1.0, _SPAN * len(values))
    average, weight = 0.0, 0.0
    found = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if math.isfinite(value):
            average = keep * average + (1 - keep) * float(value)
            weight = keep * weight + (1 - keep)
            found[index] = average / weight
    return found


def _draw(axes: Axes, curve: Curve) -> bool:
    """Draw one curve; return whether its average is drawn over it."""
    values = np.where(np.isfinite(curve.values), curve.values, np.nan)
    noisy = is_noisy(values)
    marker = "o" if len(values) < 3 else None
    if noisy:
        axes.plot(curve.steps, values, color=_COLOUR, alpha=0.25, linewidth=0.8, label="each step")
        average = smoothed(values)
        axes.plot(curve.steps, average, color=_COLOUR, linewidth=1.8, label="moving average")
    else:
        axes.plot(curve.steps, values, color=_COLOUR, linewidth=1.6, marker=marker)
    # Names are texts, never markup: a dollar sign would begin a formula.
    axes.set_title(curve.name, loc="left", fontsize=12, fontweight="bold", parse_math=False)
    axes.set_xlabel("steps")
    axes.set_ylabel(_UNITS.get(curve.name, "value"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.10g}")
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    return noisy


def draw_curves(events: Path, out: Path, *, title: str = "") -> bool:
    """Draw every scalar of a folder of event files into one PNG, see `curves_png`.

    Args:
        events: the folder, without those below it.
        out: the picture; removed where there is nothing to draw.
        title: above all curves.

    Returns:
        Whether there was anything to draw.
    """
    data = curves_png(events, title=title)
    if data is None:
        out.unlink(missing_ok=True)
        return False
    atomic.write(out, data)
    return True


def curves_png(events: Path, *, title: str = "") -> bytes | None:
    """Return a PNG of 1200 pixels' width with every scalar of a folder of event files.

    None where there is nothing to draw.
    """
    curves = read_curves(events) if events.is_dir() else []
    if not curves:
        return None
    rows = -(-len(curves) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH, rows * _HEIGHT + 0.6), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False)
    noisy: list[Axes] = []
    for axes, curve in zip(grid.flat, curves, strict=False):
        if _draw(axes, curve):
            noisy.append(axes)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    if noisy:
        lines, labels = noisy[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, parse_math=False)
    data = io.BytesIO()
    canvas.print_figure(data, format="png", metadata={"Software": None})
    return data.getvalue()
