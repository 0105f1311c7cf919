"""`latentmake report` and `compare`: write a page about runs.

In a comparison, pictures of several runs stand side by side if they have the same prompt and step.
Generated clips must have the same prompt and seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import JsonValue

from latentmake.base.errors import ConfigError, TrainingError
from latentmake.commands.project import plan_of, print_json, run_names, show_page
from latentmake.config.root import Config
from latentmake.pages.page import FPS, Pictures, as_text, write_page
from latentmake.pages.pictured import Pictured, Row, pictures_in
from latentmake.pages.report import write_report
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import PREVIOUS, run_folder

_DIGEST = 12  # digits of a digest that a page shows
_LONGEST = 200  # most characters of runs' names in the name of a page


def report(facts: Facts, run: str, open_page: bool, as_json: bool) -> None:
    """Write a page with the caches of a run, its training, its buckets and its items."""
    path = Path(f"reports/report_{run}.html")
    run_names(facts.config, [run])
    status = write_report(facts, plan_of(facts, [run]).runs[run], path)
    if as_json:
        print_json({"page": str(path), **status.model_dump(mode="json")})
        return
    show_page(path, opens=open_page)


# -- a comparison ---------------------------------------------------------------------------------


def compare(facts: Facts, runs: Sequence[str], open_page: bool, as_json: bool) -> None:
    """Write a page with the sample pictures and clips of runs; nothing is trained."""
    names = run_names(facts.config, runs)
    results = [pictured(facts.config, name) for name in names]
    path = page_path(names)
    if len(names) == 1:
        before = pictures_in(run_folder(names[0]) / PREVIOUS, f"{names[0]} (previous)")
        if before is None:
            line = f"{names[0]}: no previous result with pictures: only the present is shown"
            typer.echo(line, err=as_json)
        else:
            results.insert(0, before)
    write_comparison(results, path, partial(typer.echo, err=as_json))
    if as_json:
        values = [result.values() for result in results]
        print_json({"page": str(path), "results": values})
    if open_page:
        typer.launch(path.absolute().as_uri())


def pictured(config: Config, name: str) -> Pictured:
    """Return the result of a run with its pictures; raises UserError if it has none."""
    if (result := pictures_in(run_folder(name), name)) is not None:
        return result
    run, where = config.runs[name], f"run {name}"
    draws = getattr(run.trainer, "draws", None)
    if draws is None:
        raise ConfigError("draws no sample pictures: only the trainers sd and wan do", where=where)
    if not draws:
        hint = f"make clips: latentmake build generate_{name}"
        hint = hint if run.generate else "set `samples: {prompts: [...]}` of its trainer"
        raise ConfigError("draws no samples without prompts", where=where, hint=hint)
    hint = f"make them: latentmake build {name}"
    raise TrainingError("has no sample pictures yet", where=where, hint=hint)


def page_path(names: Sequence[str]) -> Path:
    """Return the path of the page that compares these runs."""
    return Path("reports", f"compare_{'_vs_'.join(names)[:_LONGEST]}.html")


def write_comparison(runs: Sequence[Pictured], path: Path, say: Callable[[str], object]) -> None:
    """Write the page that compares runs; raises StorageError.

    `say` receives a line about the page, and a line for each picture that cannot be shown.
    """
    values = gather(runs, path, say)
    size = write_page(path, "compare", values["title"], values)
    say(f"{path}: {len(values['pictures'])} pictures, {size}")


def gather(runs: Sequence[Pictured], path: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Return the values of the page at a path.

    `say` receives a line for each picture that cannot be shown.
    """
    by_run = {run.name: [*run.files()] for run in runs}
    pictures = Pictures(path, [file for files in by_run.values() for _, _, file in files])
    rows = list(dict.fromkeys(row for files in by_run.values() for row, _, _ in files))
    sides = []
    for run, (name, files) in zip(runs, by_run.items(), strict=True):
        cells: dict[Row, dict[str, int | str]] = {row: {} for row in rows}
        for row, step, file in files:
            cells[row][step] = pictures.add(file)
        sides.append({"name": name, "cells": [*cells.values()], "weights": run.weights()})
    for fault in pictures.faults:
        say(f"not shown: {fault}")
    speeds = [float(run.clips.settings.get("fps", FPS)) for run in runs if run.clips]
    return {
        "title": " vs ".join(by_run),
        "sides": sides,
        "rows": [_label(*row) for row in rows],
        "steps": sorted({step for run in runs if run.samples for step in run.samples.steps}),
        "pictures": pictures.embedded,
        "clips": pictures.clips,
        "losses": [[run.name, *line] for run in runs for line in run.losses()],
        "fps": max(speeds, default=FPS),
        "settings": settings_table([run.settings() for run in runs]),
    }


def _label(prompt: str, seed: int | None) -> str:
    """Return the text of a row."""
    text = as_text(prompt) or "(the empty prompt)"
    return text if seed is None else f"{text} (seed {seed})"


def _text(key: str, value: JsonValue) -> str:
    if key in ("weights", "data") and isinstance(value, str):
        return value[:_DIGEST]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings_table(settings: Sequence[Mapping[str, JsonValue]]) -> list[tuple[str, list[str]]]:
    """Return name and texts of each setting: one text per run, "–" if the run lacks the setting."""
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    return [
        (key, [_text(key, of_run[key]) if key in of_run else "–" for of_run in settings])
        for key in keys
    ]
