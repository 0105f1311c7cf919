"""Curves of a training as one picture, read from TensorBoard's event files."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
_WIDTH, _HEIGHT = 12.0, 2.9  # inches, of 100 pixels: of the picture, of one row of curves
_COLUMNS = 2
_NOISY = 0.3  # share of a curve's turning points; noise turns at two points of three
_LEAST = 20  # points; fewer are seen as they are
_SPAN = 0.04  # of the curve that an average reaches back, roughly
_COLOUR = "#1f6feb"


def read_curves(events: Path) -> dict[str, tuple[Values, Values]]:
    """Return steps and values of all scalars of a folder of event files, by their tags.

    Those of every training come first. A file that was cut short gives what it holds; a resumed
    training's points replace those it had written before.
    """
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = {*accumulator.Tags()["scalars"]}
    found = {}
    for name in [*(name for name in _UNITS if name in names), *sorted(names - _UNITS.keys())]:
        points = [(point.step, point.value) for point in accumulator.Scalars(name)]
        steps, values = np.array(points, np.float64).T
        found[name] = steps, values
    return found


def is_noisy(values: Values) -> bool:
    """Whether a curve [points] goes up and down so often that its average says more."""
    differences = np.diff(values[np.isfinite(values)])
    turns = np.count_nonzero(differences[1:] * differences[:-1] < 0)
    return len(differences) >= _LEAST and bool(turns > _NOISY * (len(differences) - 1))


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


def _draw(axes: Axes, name: str, steps: Values, values: Values) -> None:
    values = np.where(np.isfinite(values), values, np.nan)
    if is_noisy(values):
        axes.plot(steps, values, color=_COLOUR, alpha=0.25, linewidth=0.8, label="each step")
        average = smoothed(values)
        axes.plot(steps, average, color=_COLOUR, linewidth=1.8, label="moving average")
    else:
        marker = "o" if len(values) < 3 else None
        axes.plot(steps, values, color=_COLOUR, linewidth=1.6, marker=marker)
    # Names are texts, never markup: a dollar sign would begin a formula.
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold", parse_math=False)
    axes.set(xlabel="steps", ylabel=_UNITS.get(name, "value"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.10g}")
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def curves_png(events: Path, *, title: str = "") -> bytes | None:
    """Return a PNG of 1200 pixels' width with every scalar of a folder of event files.

    Folders below it do not count. None where there is nothing to draw.
    """
    curves = read_curves(events) if events.is_dir() else {}
    if not curves:
        return None
    rows = -(-len(curves) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH, rows * _HEIGHT + 0.6), dpi=100, layout="constrained")
    for number, (name, (steps, values)) in enumerate(curves.items(), 1):
        _draw(figure.add_subplot(rows, _COLUMNS, number), name, steps, values)
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    if lines := next((each for each in legends if each[1]), None):
        figure.legend(*lines, loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, parse_math=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()
