"""Table of trainers: kind -> backend.

A kind is `kind` of a run's `trainer` and of every order file of that trainer. To add a trainer, add
its settings to `config/trainers`, a folder with a subclass of `Backend`, and a line here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.errors import TrainingError
from latentmake.index.memo import MEMO, Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.run_plan import RunPlan
from latentmake.training.backend import Backend

if TYPE_CHECKING:
    from latentmake.caches.job import ExternalEncoder

BACKENDS = {
    "sd": "latentmake.training.sd.plan:Sd",
    "wan": "latentmake.training.wan.plan:Wan",
    "musubi": "latentmake.training.external.musubi.backend:Musubi",
    "sdscripts": "latentmake.training.external.sdscripts.backend:SdScripts",
}
"""Kind -> module and class, imported on first use."""

_ENCODERS = {
    "musubi": ("latentmake.training.external.musubi", "command", "ScriptsEncoding"),
    "sdscripts": ("latentmake.training.external.sdscripts", "order", "StrategiesEncoding"),
}
"""Encoder of a model -> package of the program that encodes, its module that has the program's
digest, and the class of its jobs."""

_WITHOUT_TRAINER = {"musubi": "musubi"}
"""Layout -> kind of a run without `trainer`, which can be published."""


@cache
def backend(kind: str) -> Backend:
    """Return the backend of a kind."""
    module, name = BACKENDS[kind].split(":")
    found = getattr(import_module(module), name)()
    assert isinstance(found, Backend)
    return found


def of_run(config: Config, run: str) -> Backend | None:
    """Return the backend of a run; None if it has no trainer."""
    settings = config.runs[run]
    if settings.trainer is not None:
        return backend(settings.trainer.kind)
    kind = _WITHOUT_TRAINER.get(config.models[settings.model].layout)
    return None if kind is None else backend(kind)


def of_order(order: Path) -> Backend:
    """Return the backend of an order file; a TrainingError says that it is no known trainer's."""
    try:
        return backend(from_json(order.read_bytes())["kind"])
    except (OSError, ValueError, LookupError, TypeError):
        hint = "run the build's command again, which writes it anew"
        raise TrainingError("is not an order of a known trainer", where=order, hint=hint) from None


def plan_training(facts: Facts, plan: RunPlan, *, train: bool = True) -> None:
    """Write the order of a run whose manifest is planned; see `Backend.plan`."""
    if (found := of_run(facts.config, plan.name)) is not None:
        found.plan(facts, plan, train=train)
        if plan.reasons:
            from latentmake.training.edited import count_items

            count_items(facts, plan)


def outputs(config: Config, plan: RunPlan, word: str, *, finished: bool) -> dict[str, str]:
    """Return the outputs of `{word}_{run}`, with their captions; see `Backend.outputs`."""
    trains, found = config.runs[plan.name].trainer is not None, of_run(config, plan.name)
    if found is None or not trains or plan.trainer is None:
        return {}
    files = found.outputs(plan.trainer, word, finished=finished).items()
    # Braces would be a pattern to Snakemake.
    return {str(path): caption for path, caption in files if not set("{}") & set(str(path))}


def facts_of(config: Config, **options: bool) -> Facts:
    """Return the facts of a project, with its memo; options are as of `Facts`."""
    return Facts(config, Memo(MEMO), program_digest=program_digest, **options)


def program_digest(program: ExternalProgram, model: Model, kind: str, memory: Memo) -> str:
    """Return the digest of the program that encodes a model's `latents` or `text`."""
    package, module, _ = _ENCODERS[model.encoder]
    found: str = import_module(f"{package}.{module}").program_digest(program, model, kind, memory)
    return found


def encoder_of(order: Order) -> ExternalEncoder | None:
    """Return the external program's encoder of an order; None where our encoders do it."""
    if order.model_settings.encoder not in _ENCODERS:
        return None
    package, _, name = _ENCODERS[order.model_settings.encoder]
    found: ExternalEncoder = getattr(import_module(f"{package}.encode"), name).make
    return found
