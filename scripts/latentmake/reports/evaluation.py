"""Page of an evaluation: clips side by side in step, losses by timestep, figures in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import atomic
from latentmake.reports.page import ClipSources, page, table, template_digest
from latentmake.training.wan.evaluation import KINDS, METRICS, Metrics

_LABELS = {"real": "real", "base": "base", "adapter": "with the adapter"}
_LOSS = (
    "How far the network's prediction is from the truth on items that did not train, at the same "
    "noise for both. Lower is better. Timestep 1000 is noise alone, 0 the clip itself."
)
_FIGURES = (
    "Levels go from 0 to 255. Compare base and adapter with the real clips: a good adapter comes "
    "nearer to them."
)
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
"""Figure -> its name and its meaning."""


def page_path(run: str) -> Path:
    """Return the path of a run's page."""
    return Path(f"reports/evaluate_{run}.html")


def page_state(folder: Path) -> str | None:
    """Return the digest of what the page of an evaluation's folder shows; None without results."""
    try:
        return digest.of_value([template_digest("gallery"), digest.of_file(folder / METRICS)])
    except OSError:
        return None


def write_page(folder: Path, path: Path, say: Callable[[str], object]) -> None:
    """Write the page of an evaluation's folder.

    Raises:
        UserError: the results or a clip are gone, or the disk is full.
    """
    metrics = Metrics.read(folder / METRICS)
    if metrics is None:
        raise CacheError(
            "the results are missing or damaged",
            where=folder / METRICS,
            hint="run the same command again, which computes them anew",
        )
    try:
        sources = ClipSources(path, [folder / clip.file for clip in metrics.clips()])
        data = _data(metrics, folder, sources)
    except OSError as error:
        raise CacheError(
            f"this clip cannot be read ({error.strerror})",
            where=error.filename or folder,
            hint="run the same command again, which makes it anew",
        ) from None
    text = page("gallery", f"Evaluation of {metrics.run}", data, page_state(folder) or "").encode()
    atomic.write(path, text)
    count = sum(1 for _ in metrics.clips())
    say(f"{path}: {count} clips, {len(text) / 1e6:.1f} MB; {_summary(metrics)}")


def _data(metrics: Metrics, folder: Path, sources: ClipSources) -> dict[str, Any]:
    lines = [
        {"kind": kind, "name": _LABELS[kind], "values": metrics.loss_by_timestep[kind]}
        for kind in ("base", "adapter")
    ]
    return {
        "fps": metrics.fps,
        "summary": _summary(metrics),
        "rows": [
            {
                "title": result.name,
                "caption": result.caption,
                "clips": [
                    {
                        "label": _LABELS[kind],
                        "source": sources.address(folder / clip.file),
                        "width": clip.width,
                        "height": clip.height,
                    }
                    for kind, clip in result.clips.items()
                ],
            }
            for result in metrics.results
            if result.clips
        ],
        "chart": {"timesteps": metrics.timesteps, "lines": lines},
        "tables": [*_tables(metrics)],
    }


def _tables(metrics: Metrics) -> Iterator[dict[str, Any]]:
    losses = {"mean of all": metrics.loss}
    for number, timestep in enumerate(metrics.timesteps):
        by_kind = metrics.loss_by_timestep.items()
        losses[f"{timestep:.4g}"] = {kind: values[number] for kind, values in by_kind}
    rows = [
        [name, _number(each["base"]), _number(each["adapter"]), _change(**each)]
        for name, each in losses.items()
    ]
    heads = ["timestep", _LABELS["base"], _LABELS["adapter"], "change"]
    yield table("loss", "Loss by timestep", _LOSS, heads, rows)
    if figures := metrics.figures:
        heads = ["figure", *_LABELS.values(), "meaning"]
        rows = [
            [name, *(_number(figures.get(kind, {}).get(key)) for kind in KINDS), words]
            for key, (name, words) in WORDS.items()
        ]
        yield table("figures", "Figures of the clips", _FIGURES, heads, rows)
    yield table("settings", "Settings", "", ["setting", "value"], metrics.settings.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:#.4g}"


def _change(base: float, adapter: float) -> str:
    return f"{(adapter - base) / base:+.2%}".replace("%", " %") if base else "–"


def _summary(metrics: Metrics) -> str:
    """Return the result in a sentence."""
    base, adapter = metrics.loss["base"], metrics.loss["adapter"]
    count = len(metrics.results)
    change = (adapter - base) / base * 100 if base else 0.0
    items = f"{count} held-out {'item' if count == 1 else 'items'}"
    if abs(change) < 0.05:
        return f"On {items} the adapter changes the loss by less than 0.05 %."
    word = "lowers" if change < 0 else "raises"
    return (
        f"On {items} the adapter {word} the loss by {abs(change):.1f} %, "
        f"from {base:.4g} to {adapter:.4g}."
    )
