"""Plan and launch of the evaluation of a Wan run; no torch here."""

from __future__ import annotations

from pathlib import Path

from latentmake import digest
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.lock import read_lock
from latentmake.plan.orders import run_order
from latentmake.plan.reasons import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.training.child import run_module
from latentmake.training.evaluation import EvaluationOrder, evaluation_folder, result_reasons
from latentmake.training.generation import GenerationOrder, adapter_digest
from latentmake.training.order import read_order
from latentmake.training.wan.generation import generation_order
from latentmake.training.wan.order import WanOrder


def plan_evaluation(facts: Facts, plan: RunPlan) -> tuple[Path, list[Difference]]:
    """Write the order of a run's evaluation; see `Backend.plan_evaluation`."""
    run = facts.config.runs[plan.name]
    training = plan.trainer
    assert run.validation is not None and isinstance(training, WanOrder)
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
    if not facts.asks:
        atomic.write(path, order.model_dump_json().encode())
    if waits := plan.awaited([order.generation.negative_prompt]):
        return path, waits
    if not generation.weights:
        return path, [Difference("the networks are not here")]
    adapter = adapter_digest(generation, facts.memo.digest_of_file)
    wanted = order.wanted(read_lock(plan.name).digest, adapter, training_digest(training))
    settings = settings_of(generation, training, adapter)
    return path, result_reasons(order, wanted, settings, facts.memo.digest_of_file)


def settings_of(generation: GenerationOrder, training: WanOrder, adapter: str) -> dict[str, str]:
    """Return the settings of an evaluation by name, for people."""
    return {
        "network": ", ".join(filter(None, [training.dit, training.dit_high_noise])),
        "adapter": adapter[:12],
        "steps of a clip": str(generation.steps),
        "guidance_scale": str(generation.guidance),
        "flow_shift of clips": str(generation.shift),
        "flow_shift of losses": str(training.flow_shift),
        "scheduler": generation.scheduler,
        "seed": str(generation.seeds[0]),
        "negative prompt": generation.negative_prompt,
    }


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
