"""Trainers: kind -> backend.

A kind is the value of `kind` in a run's `trainer` and in every order file of that trainer. Other
packages bring trainers by entry points, see `config.trainers.installed`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pydantic_core import from_json

from latentmake.base.errors import TrainingError
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.trainers import installed
from latentmake.data.memo import MEMO, Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.remembered import facts_with
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.backend import Backend

if TYPE_CHECKING:
    from latentmake.encode.job import ExternalEncoder

BACKENDS = {
    "sd": "latentmake.trainers.sd.plan:Sd",
    "wan": "latentmake.trainers.wan.plan:Wan",
    "musubi": "latentmake.trainers.musubi.backend:Musubi",
    "sdscripts": "latentmake.trainers.sdscripts.backend:SdScripts",
}
"""Kind -> module and class, imported on first use."""

_TRAINERS = "latentmake.trainers"
_ENCODERS = {"musubi": "ScriptsEncoding", "sdscripts": "StrategiesEncoding"}
"""Encoder of a model, which is the name of the external program's package -> class of its jobs."""
_TARGETS = {"clips": "exchange.clip_files", "export": "exchange.export"}
"""Word of a target -> module that plans it."""

_WITHOUT_TRAINER = {"musubi": "musubi"}
"""Layout -> kind of a run without `trainer`, which can be published."""


@cache
def backend(kind: str) -> Backend:
    """Return the backend of a kind."""
    module, _, name = BACKENDS.get(kind, "").partition(":")
    instance = getattr(import_module(module), name)() if name else installed()[kind].load()()
    assert isinstance(instance, Backend)
    return instance


def of_run(config: Config, run: str) -> Backend | None:
    """Return the backend of a run; None if it has no trainer."""
    settings = config.runs[run]
    if settings.trainer is not None:
        return backend(settings.trainer.kind)
    kind = _WITHOUT_TRAINER.get(config.models[settings.model].layout)
    return None if kind is None else backend(kind)


def of_order(order: Path) -> Backend:
    """Return the backend of an order file; raises TrainingError if its trainer is unknown."""
    try:
        return backend(from_json(order.read_bytes())["kind"])
    except (OSError, ValueError, LookupError, TypeError):
        hint = "run the build's command again, which writes it anew"
        raise TrainingError("is not an order of a known trainer", where=order, hint=hint) from None


def plan_training(facts: Facts, plan: RunPlan, *, train: bool = True) -> None:
    """Write the training order of a run after its manifest is planned; see `Backend.plan`."""
    if (run_backend := of_run(facts.config, plan.name)) is not None:
        run_backend.plan(facts, plan, train=train)
        if plan.reasons:
            from latentmake.runs.edited import count_items  # most plans train nothing

            count_items(facts, plan)


def target_module(word: str) -> ModuleType:
    """Return the module that plans `clips` or `export`.

    Its `plan_for(facts, run)` returns an order, and `reasons(facts, run, place)` says why the file
    at a place, or all files of the target, would be written.
    """
    return import_module(f"{_TRAINERS}.{_TARGETS[word]}")


def programs(config: Config) -> dict[str, str]:
    """Return section of the configuration -> folder and commit of each external program."""
    installation = import_module(f"{_TRAINERS}.launched.installation")
    settings = {"musubi_tuner": config.musubi_tuner, "sd_scripts": config.sd_scripts}
    folders = {name: Path(own.path).expanduser() for name, own in settings.items() if own}
    return {
        name: f"{folder}: {installation.proven_commit(name, folder).note}"
        for name, folder in folders.items()
    }


def facts_of(config: Config, **options: bool) -> Facts:
    """Return the facts of a project, with its memo; `options` are arguments of `Facts`."""
    return facts_with(config, Memo(MEMO), program_digest=program_digest, **options)


def program_digest(program: object, model: Model, kind: str, memory: Memo) -> str:
    """Return the digest of the external program that encodes a model's `latents` or `text`."""
    module = import_module(f"{_TRAINERS}.{model.encoder}.order")
    result: str = module.program_digest(program, model, kind, memory)
    return result


def encoder_of(order: Order) -> ExternalEncoder | None:
    """Return the external encoder of an order; None if Latentmake's encoders encode it."""
    name = order.model_settings.encoder
    if name not in _ENCODERS:
        return None
    module = import_module(f"{_TRAINERS}.{name}.encode")
    encoder: ExternalEncoder = getattr(module, _ENCODERS[name]).make
    return encoder
