"""What follows a training, as its targets are named: `generate` and `evaluate`."""

from __future__ import annotations

from pathlib import Path

from latentmake.config.root import Config
from latentmake.errors import ConfigError
from latentmake.plan.facts import Facts
from latentmake.plan.lock import run_folder
from latentmake.plan.reasons import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.reports.evaluation import page_path, page_state
from latentmake.reports.generated import page_reasons
from latentmake.reports.page import state_in
from latentmake.training.backend import Backend
from latentmake.training.wan.evaluation import evaluation_folder
from latentmake.training.wan.generation import FOLDER


def refuse_following(config: Config, run: str, word: str) -> None:
    """Refuse `{word}_{run}` of a run without a trainer for it, or without held-out items.

    Raises:
        ConfigError: it cannot be made.
    """
    trainer, where = config.runs[run].trainer, f"{word}_{run}"
    if trainer is None or not (trainer.generates if word == "generate" else trainer.evaluates):
        does = "draws no clips" if word == "generate" else "evaluates nothing"
        what = f"the run {run} has no trainer" if trainer is None else f"its trainer {does}"
        hint = "only the trainer wan does; set `kind: wan` for a Wan model"
        raise ConfigError(what, where=where, hint=hint)
    if word == "evaluate" and config.runs[run].validation is None:
        raise ConfigError(
            f"all items of the run {run} train, so there is none to evaluate it by",
            where=f"runs.{run}.validation",
            hint="hold some out: `validation: {items: 16}`; it is trained again without them",
        )


def plan_following(
    facts: Facts, plan: RunPlan, backend: Backend, word: str
) -> tuple[Path, list[Difference]]:
    """Return the order of clips or an evaluation, and why these or their page are not up to date.

    Raises:
        UserError: it could not be carried out.
    """
    path, reasons = backend.plan_following(facts, plan, word)
    if reasons:
        return path, reasons
    if word == "generate":
        folder = run_folder(plan.name)
        reasons, receipt = page_reasons(folder / FOLDER), folder / "generated.json"
        if not reasons and not receipt.is_file():
            reasons = [Difference(f"{receipt} is missing")]
        return path, reasons
    page, state = page_path(plan.name), page_state(evaluation_folder(plan.name))
    shown = state is not None and state == state_in(page)
    return path, [] if shown else [Difference(f"{page} does not show these results")]
