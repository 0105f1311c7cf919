"""Plan and launch of the evaluation of a Wan run; no torch here."""

from __future__ import annotations

from pathlib import Path

from latentmake import digest
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.lock import read_lock
from latentmake.plan.orders import run_order
from latentmake.plan.run_plan import RunPlan
from latentmake.training.child import run_module
from latentmake.training.evaluation import EvaluationOrder, evaluation_folder, is_evaluated
from latentmake.training.generation import adapter_digest
from latentmake.training.order import read_order
from latentmake.training.wan.generation import generation_order
from latentmake.training.wan.order import WanOrder


def plan_evaluation(facts: Facts, plan: RunPlan) -> tuple[Path, bool]:
    """Write the order of a run's evaluation; see `Backend.plan_evaluation`."""
    run = facts.config.runs[plan.name]
    assert run.validation is not None and plan.trainer_order is not None
    generation = generation_order(facts, plan.name, run)
    order = EvaluationOrder(
        kind=generation.kind,
        run=plan.name,
        training=str(plan.trainer_order),
        output=str(evaluation_folder(plan.name)),
        clips=run.validation.clips,
        resolution=run.resolutions[0].name,
        generation=generation.model_copy(
            update={"prompts": [], "captions": 0, "image": None}  # those of each item
        ),
        planned=generation.planned,
    )
    path = run_order(plan.name, "evaluate", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    waits = (
        plan.training_order is not None
        or plan.manifest_order is not None
        or plan.awaits([order.generation.negative_prompt])
        or not generation.weights
    )
    if waits:
        return path, False
    training = read_order(plan.trainer_order, WanOrder)
    adapter = adapter_digest(generation, facts.memo.digest_of_file)
    wanted = order.wanted(read_lock(plan.name).digest, adapter, training_digest(training))
    return path, is_evaluated(order, wanted, facts.memo.digest_of_file)


def training_digest(training: WanOrder) -> str:
    """Return the digest of a training's network, and of all settings that shape a loss."""
    settings = training.trainer
    how = [training.flow_shift, training.boundary, settings.timestep_sampling]
    return digest.of_value([training.weights, how, settings.mixed_precision])


def launch(order_path: Path, *, log: Path, threads: int) -> Path:
    """Bring the results of an order up to date, in a process of its own; return their path."""
    order = read_order(order_path, EvaluationOrder)
    run_module(
        "latentmake.training.wan.evaluate",
        order,
        run=order.run,
        folder=Path(order.output),
        log=log,
        threads=threads,
        online=bool(order.generation.model.vae.hub),
    )
    return order.metrics
