"""`latentmake explain`: where a file of a build comes from, and why it is made again."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated

import typer

from latentmake import backends
from latentmake.errors import ConfigError
from latentmake.exchange.clip_files import CLIPS, LIST, plan_clips
from latentmake.plan.run_plan import RunPlan, stale_targets
from latentmake.plan.state import Difference
from latentmake.reports.following import outdated, refuse_following
from latentmake.words.file_origin import Explanation, explanations
from latentmake.words.project import ConfigFiles, Directory, Json, Project, opened

_MADE = {
    "caches": r"caches_{run}|runs/{run}/(dataset\.lock|manifest\.jsonl)",
    "generate": r"generate_{run}|runs/{run}/generated(\.json|/.*)",
    "evaluate": r"evaluate_{run}|runs/{run}/evaluation/.*|reports/evaluate_{run}\.html",
    "clips": r"clips_{run}|clips/{run}/.*",
    "train": r"train_{run}|runs/{run}/.*",
    "page": r"reports/(captions|report)_{run}\.(html|jsonl)|reports/compare_{run}(_vs_.*)?\.html",
}
"""What is asked -> pattern of its target and of the files that it makes."""
_FRESH = {"train": "trained; nothing differs", "page": "`latentmake` writes it anew when asked"}


def explain(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A cache file, an image or caption of a dataset, a file below runs/, clips/ or "
            "reports/, or a target such as train_cats.",
        ),
    ],
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Say where a file comes from, and why it is fresh or stale; why a run is trained again."""
    with opened(configfile, directory, encoders=True) as project:
        found = _of_run(project, path) or explanations(project.facts, path)
    if as_json:
        typer.echo(json.dumps([each.values() for each in found], indent=1))
    else:
        typer.echo("\n".join(line for each in found for line in (*each.lines(), "")), nl=False)


def _of_run(project: Project, path: str) -> list[Explanation]:
    """Explain a target of a run, or a file that one makes; nothing where it is neither."""
    place = os.path.relpath(path or ".")
    for run in project.config.runs:
        for word, pattern in _MADE.items():
            if re.fullmatch(pattern.format(run=re.escape(run)), place):
                found = _reasons(project, word, run, place)
                state, reason = ("stale", "") if found else ("fresh", _FRESH.get(word, ""))
                return [Explanation(place, state, reason, differences=found, runs=[run])]
    return []


def _reasons(project: Project, word: str, run: str, place: str) -> list[Difference]:
    """Return why what a word makes of a run is made again.

    Raises:
        UserError: the word makes nothing of this run.
    """
    config, facts = project.config, project.facts
    if word == "page":
        return []
    if word in ("generate", "evaluate"):
        refuse_following(config, run, word)
    elif word == "train" and config.runs[run].trainer is None:
        raise ConfigError("the run has no trainer", where=place, hint=f"see runs.{run}")
    if word == "clips":
        return _clip_reasons(project, run, place)
    drawn = [run] if word in ("generate", "evaluate") else []
    plan = project.plan([run], drawn).runs[run]
    if word in ("caches", "train"):
        return plan.reasons if word == "train" else _cache_reasons(plan)
    backend = backends.of_run(config, run)
    assert backend is not None
    return backend.plan_following(facts, plan, word)[1] or outdated(run, word)


def _cache_reasons(plan: RunPlan) -> list[Difference]:
    """Return why caches, manifest or lock are made again; those of prompts are in no manifest."""
    parts = {f"{part.dataset}/{part.name}": state for part, state in plan.parts.items()}
    return list(dict.fromkeys((*stale_targets(parts), *plan.outdated)))


def _clip_reasons(project: Project, run: str, place: str) -> list[Difference]:
    """Return why clips of a run, or one of them, are cut again."""
    order = plan_clips(project.facts, run)
    named = {str(order.path(file)): file for file in order.files}
    whole = place in (f"clips_{run}", str(CLIPS / run / LIST))
    if not whole and place not in named:
        return [Difference("no clip of the run has this name; the next build removes it")]
    asked = named if whole else {place: named[place]}
    return [
        each._replace(name=f"{path}: {each.name}" if whole else each.name)
        for path, file in asked.items()
        for each in order.differences(file, file.source()[-1])
    ]
