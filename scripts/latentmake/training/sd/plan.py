"""Plan of a run of the trainer `sd`: its order, and whether it is trained."""

from __future__ import annotations

import time
from pathlib import Path

from latentmake.config import Model, Run, SdTrainer
from latentmake.errors import ModelError
from latentmake.files import atomic
from latentmake.models import recipe
from latentmake.models.checks import check_names, parameter_names, read_schedule, schedule_of
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan, awaits_prompts, prompt_path, run_folder
from latentmake.training.checks import refuse_failed
from latentmake.training.order import Prompt, TextSchedule, TrainingOrder
from latentmake.training.result import Record, RunFiles, checkpoint_digest, wanted_of
from latentmake.training.sample_images import are_drawn
from latentmake.training.sd.checks import check_settings

__all__ = ["plan_training"]

_CAPTIONS = 4  # drawn where a run names no prompts


def plan_training(facts: Facts, plan: RunPlan, *, train: bool) -> None:
    """Write the order of a run, and decide whether it is to be trained; see `Backend.plan`."""
    run = facts.config.runs[plan.name]
    trainer = run.trainer
    assert isinstance(trainer, SdTrainer)
    _check_network(trainer, facts.config.models[run.model], f"runs.{plan.name}.trainer")
    order = _order(facts, plan.name, run, trainer)
    plan.trainer_order = run_order(plan.name, "train", order.planned)
    atomic.write(plan.trainer_order, order.model_dump_json().encode())
    if not _is_trained(order, plan):
        plan.training_order = plan.trainer_order
        if train:
            refuse_failed(check_settings(trainer, here=facts.runs_jobs))


def _check_network(trainer: SdTrainer, model: Model, where: str) -> None:
    """Refuse settings that do not fit the UNet or its noise schedule, as far as these are known."""
    assert model.unet is not None
    if (names := parameter_names(model.unet)) is not None:
        check_names(trainer, names, where)
    scheduler = schedule_of(model.unet, model.scheduler)
    if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
        read_schedule(scheduler, trainer.prediction_type)


def _order(facts: Facts, name: str, run: Run, trainer: SdTrainer) -> TrainingOrder:
    model, folder = facts.config.models[run.model], run_folder(name)
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    weights = ""
    try:
        if not any(facts.is_pending(path) for path in (model.unet.path, scheduler)):
            read, projection = facts.memo.digest_of_file, model.text_projection
            weights = recipe.training_digest(
                model.unet, scheduler, read, text_projection=projection
            )
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{run.model}.unet", hint=error.hint
        ) from None
    samples, size = trainer.samples, trainer.samples.resolution or run.resolutions[0]
    guided = samples.guidance_scale > 1
    return TrainingOrder(
        run=name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        unet=model.unet,
        weights=weights,
        resumed=_resumed(facts, trainer, folder),
        text_projection=model.text_projection,
        scheduler=scheduler,
        vae=model.vae,
        prompts=[
            Prompt(prompt=text, text=prompt_path(facts.config, run.model, text))
            for text in samples.prompts
        ],
        captions=0 if samples.prompts else _CAPTIONS,
        negative=prompt_path(facts.config, run.model, samples.negative_prompt) if guided else None,
        sample_size=(size.width, size.height),
        trainer=trainer,
        texts=_text_schedules(facts, run),
        planned=time.time_ns(),
    )


def _is_trained(order: TrainingOrder, plan: RunPlan) -> bool:
    """Whether weights and sample pictures came from what an order says."""
    if not plan.lock or not order.weights or awaits_prompts(plan, order.trainer.prompts):
        return False
    wanted = wanted_of(order, data=plan.lock, weights=order.weights)
    files = RunFiles(order)
    return (
        files.trained(wanted) is not None
        and (files.output / "trained.json").is_file()
        and are_drawn(order, wanted)
    )


def _resumed(facts: Facts, trainer: SdTrainer, folder: Path) -> str:
    """Return the digest of the checkpoint that a training begins with.

    One that is gone, because its own run was trained again, makes no weights stale that came of it.
    """
    if trainer.resume_from_checkpoint is None:
        return ""
    place = Path(trainer.resume_from_checkpoint)
    record = Record.read(folder / "training.json")
    known = record.wanted.resumed if record else ""
    return checkpoint_digest(place, facts.memo.digest_of_file) or known or "none"


def _text_schedules(facts: Facts, run: Run) -> dict[str, TextSchedule]:
    """Return how the variants of each dataset's texts depend on the step, where they do."""
    found = {}
    for name in run.datasets:
        making = facts.config.datasets[name].captions
        if making and (making.token_warmup_step or making.caption_dropout_every_n_epochs):
            found[name] = TextSchedule(
                token_warmup_step=making.token_warmup_step,
                caption_dropout_every_n_epochs=making.caption_dropout_every_n_epochs,
            )
    return found
