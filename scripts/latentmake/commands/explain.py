"""`latentmake explain`: explain where a file comes from, and why a build makes it again."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from latentmake import backends
from latentmake.base.errors import ConfigError
from latentmake.commands import completion, weights_origin
from latentmake.commands.file_origin import Explanation, explanations
from latentmake.commands.project import coloured, plan_of, print_json
from latentmake.pages.following import outdated, refuse_following
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.product import Difference, judge
from latentmake.plan.run_plan import stale_targets
from latentmake.runs.order import Record

_MADE = {
    "caches": r"caches_{run}|runs/{run}/(dataset\.lock|manifest\.jsonl)",
    "generate": r"generate_{run}|runs/{run}/generated(\.json|/.*)",
    "evaluate": r"evaluate_{run}|runs/{run}/evaluation/.*|reports/evaluate_{run}\.html",
    "clips": r"clips_{run}|clips/{run}/.*",
    "publish": r"publish_{run}",
    "export": r"export_{run}",
    "train": r"train_{run}|runs/{run}(/.*)?",
}
"""Word of a target -> pattern of the target and of the files that it makes."""


def explain(facts: Facts, path: str, open_page: bool, as_json: bool) -> None:
    """Say where a file comes from, and why it is fresh or stale; why a run is trained again."""
    of_run = _of_run(facts, path)
    weights = weights_origin.explained(facts, path, of_run)
    if open_page and weights is None:
        hint = "name a .safetensors file of trained weights"
        raise ConfigError("`--open` shows the items of trained weights", where=path, hint=hint)
    if weights and open_page:
        weights.open_page(facts)
    explained = weights or of_run
    _print([explained] if explained else explanations(facts, path), as_json=as_json)


def _print(explained: Sequence[Explanation], *, as_json: bool) -> None:
    if as_json:
        print_json([explanation.values() for explanation in explained])
    else:
        lines = (line for explanation in explained for line in (*explanation.lines(coloured), ""))
        typer.echo("\n".join(lines), nl=False)


def without_project(
    path: str,
    open_page: bool,
    as_json: bool,
    configfile: Sequence[Path] | None,
    directory: Path | None,
) -> bool:
    """Explain a file of weights in a folder without a configuration, and return whether it did."""
    if configfile or completion.files(directory or Path()):
        return False
    if (explanation := weights_origin.explained(None, path)) is None:
        return False
    if open_page:
        explanation.open_page(None)
    _print([explanation], as_json=as_json)
    return True


def _of_run(facts: Facts, path: str) -> Explanation | None:
    """Explain a target of a run, or a file that a target makes; None if it is neither."""
    place = os.path.relpath(path or ".")
    if (named := facts.config.runs.get(place)) is not None:
        place = f"{'train' if named.trainer else 'caches'}_{place}"
    for run in facts.config.runs:
        previous = run_folder(run) / PREVIOUS
        if Path(place).is_relative_to(previous) and os.path.lexists(place):
            meaning = f"the result before that of train_{run}; a new training replaces it"
            now, was = (
                Record.read(folder / "training.json") for folder in (run_folder(run), previous)
            )
            changed = judge(now.product, was) if now and was else []
            return Explanation(place, "previous", meaning, differences=changed, runs=[run])
        for word, pattern in _MADE.items():
            if re.fullmatch(pattern.format(run=re.escape(run)), place):
                reasons = _reasons(facts, word, run, place)
                fresh = "trained; nothing differs" if word == "train" else ""
                state, reason = ("stale", "") if reasons else ("fresh", fresh)
                return Explanation(place, state, reason, differences=reasons, runs=[run])
    return None


def _reasons(facts: Facts, word: str, run: str, place: str) -> list[Difference]:
    """Return the reasons why a build makes a run's target again; raises UserError."""
    backend = backends.of_run(facts.config, run)
    if word == "clips":
        return _reasons_of_target(facts, word, run, place)
    follows = word in ("generate", "evaluate")
    if follows:
        refuse_following(facts.config, run, word)
    elif word == "train" and facts.config.runs[run].trainer is None:
        raise ConfigError("the run has no trainer", where=place, hint=f"see runs.{run}")
    elif word == "publish" and not (backend and backend.publishes):
        hint = "only runs of musubi-tuner and sd-scripts are"
        raise ConfigError("the run is not published", where=place, hint=hint)
    elif word == "publish" and backend and not facts.config.publish.caches:
        return backend.publication_reasons(facts, run)
    plan = plan_of(facts, [run], [run] if follows else []).runs[run]
    if word == "train":
        return plan.reasons
    if follows and backend is not None:
        return backend.plan_following(facts, plan, word)[1] or outdated(run, word)
    # `outdated` is about the manifest, which does not contain the prompts.
    parts = {f"{part.dataset}/{part.name}": state for part, state in plan.parts.items()}
    reasons = list(dict.fromkeys((*stale_targets(parts), *plan.outdated)))
    if reasons or word == "caches":
        return reasons
    if word == "export":
        return _reasons_of_target(facts, word, run, place)
    return backend.publication_reasons(facts, run) if backend else []


def _reasons_of_target(facts: Facts, word: str, run: str, place: str) -> list[Difference]:
    reasons: list[Difference] = backends.target_module(word).reasons(facts, run, place)
    return reasons
