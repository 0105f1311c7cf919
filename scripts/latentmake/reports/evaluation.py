"""Page of an evaluation: clips side by side in step, losses by timestep, figures in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.config import Config
from latentmake.errors import CacheError, ConfigError
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan
from latentmake.reports.clips import ClipSources
from latentmake.reports.page import page, state_in, template_digest
from latentmake.training.backend import Backend
from latentmake.training.clip_statistics import WORDS
from latentmake.training.evaluation import KINDS, METRICS, Metrics, Result, evaluation_folder

__all__ = ["page_path", "page_state", "plan_evaluated", "refuse_evaluation", "write_page"]

_NOT_MADE = {
    "real": "The item has no clip.",
    "base": "No clip was made.",
    "adapter": "No clip was made.",
}


def page_path(run: str) -> Path:
    """Return the path of a run's page."""
    return Path(f"reports/evaluate_{run}.html")


def refuse_evaluation(config: Config, run: str) -> None:
    """Refuse `evaluate_{run}` of a run that holds nothing out, or has no trainer for it.

    Raises:
        ConfigError: it has not.
    """
    settings = config.runs[run]
    if settings.trainer is None or not settings.trainer.evaluates:
        without = settings.trainer is None
        what = f"the run {run} has no trainer" if without else "its trainer evaluates nothing"
        hint = "only the trainer wan does; set `kind: wan` for a Wan model"
        raise ConfigError(what, where=f"evaluate_{run}", hint=hint)
    if settings.validation is None:
        raise ConfigError(
            f"all items of the run {run} train, so there is none to evaluate it by",
            where=f"runs.{run}.validation",
            hint="hold some out: `validation: {items: 16}`; it is trained again without them",
        )


def plan_evaluated(facts: Facts, plan: RunPlan, backend: Backend, *, force: bool) -> Path | None:
    """Return the order of a run's evaluation; None where results and page are up to date.

    Raises:
        UserError: it could not be carried out.
    """
    path, there = backend.plan_evaluation(facts, plan)
    if there and not force:
        state = page_state(evaluation_folder(plan.name) / METRICS)
        if state is not None and state == state_in(page_path(plan.name)):
            return None
    return path


def page_state(metrics: Path) -> str | None:
    """Return the digest of what a page shows; None without results."""
    try:
        return digest.of_value([template_digest("evaluate"), digest.of_file(metrics)])
    except OSError:
        return None


def write_page(metrics_path: Path, path: Path, say: Callable[[str], object]) -> None:
    """Write the page of `metrics.json`, whose folder has the clips.

    Raises:
        UserError: the results or a clip are gone, or the disk is full.
    """
    metrics = Metrics.read(metrics_path)
    if metrics is None:
        raise CacheError(
            "the results are missing or damaged",
            where=metrics_path,
            hint="give the same command again, which computes them anew",
        )
    folder = metrics_path.parent
    try:
        sources = ClipSources(path, [folder / clip.file for clip in metrics.clips()])
        data = _data(metrics, folder, sources)
    except OSError as error:
        raise CacheError(
            f"this clip cannot be read ({error.strerror})",
            where=error.filename or folder,
            hint="give the same command again, which makes it anew",
        ) from None
    state = page_state(metrics_path) or ""
    text = page("evaluate", f"Evaluation of {metrics.run}", data, state).encode()
    atomic.write(path, text)
    count = sum(1 for _ in metrics.clips())
    say(f"{path}: {count} clips, {len(text) / 1e6:.1f} MB; {_summary(metrics)}")


def _data(metrics: Metrics, folder: Path, sources: ClipSources) -> dict[str, Any]:
    shown = [result for result in metrics.results if result.clips]
    figures = metrics.figures
    return {
        "fps": metrics.fps,
        "summary": _summary(metrics),
        "items": [
            {
                "name": result.name,
                "caption": result.caption,
                "clips": _clips(result, folder, sources),
            }
            for result in shown
        ],
        "loss": {
            "timesteps": [round(each, 1) for each in metrics.timesteps],
            **metrics.loss_by_timestep,
            "mean": metrics.loss,
        },
        "statistics": [
            {"name": name, "words": words}
            | {kind: figures.get(kind, {}).get(key) for kind in KINDS}
            for key, (name, words) in WORDS.items()
        ]
        if figures
        else [],
        "settings": list(metrics.settings.items()),
    }


def _clips(result: Result, folder: Path, sources: ClipSources) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        clip = result.clips.get(kind)
        if clip is None:
            found[kind] = {"missing": _NOT_MADE[kind]}
            continue
        source = sources.address(folder / clip.file)
        found[kind] = {"source": source, "width": clip.width, "height": clip.height}
    return found


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
