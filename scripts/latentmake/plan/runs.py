"""The end of a run's plan: whether it is trained, and its trainer's order."""

from __future__ import annotations

import time
from pathlib import Path

from latentmake.config import Run, SdScriptsTrainer, SdTrainer
from latentmake.errors import ModelError
from latentmake.files import atomic
from latentmake.models import recipe
from latentmake.models.checks import schedule_of
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import PROMPTS, RunPlan, prompt_path, run_folder
from latentmake.training.checks import own, refuse_failed
from latentmake.training.external.musubi.plan import finish_wan
from latentmake.training.external.sdscripts.plan import finish_sdscripts
from latentmake.training.order import Prompt, TextSchedule, TrainingOrder
from latentmake.training.result import Layout, checkpoint_digest, read_record, wanted_of
from latentmake.training.sample_images import are_drawn

__all__ = ["plan_training"]

_FOUR = 4  # captions drawn where a run names no prompts


def plan_training(facts: Facts, plan: RunPlan, run: Run, *, train: bool = True) -> None:
    """Decide whether a run is to be trained, and write its trainer's order.

    Args:
        facts: of its model.
        plan: of the run, whose manifest is planned; gets the order.
        run: its section of the configuration.
        train: whether a training is asked for, so that what it lacks is named before anything else.

    Raises:
        ModelError: files of the network to be trained are missing.
        TrainingError: the trainer, its environment or the settings do not fit.
        StorageError: the disk is full or cannot be written.
    """
    if isinstance(run.trainer, SdTrainer):
        _finish_training(facts, plan, run, run.trainer)
        if train and plan.training_order is not None:
            refuse_failed(own(run.trainer, here=facts.runs_jobs))
    elif isinstance(run.trainer, SdScriptsTrainer):
        finish_sdscripts(facts, plan, run.trainer, train=train)
    elif facts.config.models[run.model].layout == "musubi":
        finish_wan(facts, plan, run, train=train)


def _finish_training(facts: Facts, plan: RunPlan, run: Run, trainer: SdTrainer) -> None:
    model, folder = facts.config.models[run.model], run_folder(plan.name)
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    pending = any(facts.is_pending(path) for path in (model.unet.path, scheduler))
    try:
        weights = (
            ""
            if pending
            else recipe.training_digest(
                model.unet,
                scheduler,
                facts.memo.digest_of_file,
                text_projection=model.text_projection,
            )
        )
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{run.model}.unet", mend=error.mend
        ) from None
    samples, size = trainer.samples, trainer.samples.resolution or run.resolutions[0]
    guided = samples.guidance_scale > 1
    order = TrainingOrder(
        run=plan.name,
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
            Prompt(prompt=text, text=prompt_path(run.model, text)) for text in samples.prompts
        ],
        captions=0 if samples.prompts else _FOUR,
        negative=prompt_path(run.model, samples.negative_prompt) if guided else None,
        sample_size=(size.width, size.height),
        trainer=trainer,
        texts=_text_schedules(facts, run),
        planned=time.time_ns(),
    )
    wanted = wanted_of(order, data=plan.lock or "", weights=weights)
    stale_prompts = any(plan.parts[part].stale for part in plan.parts if part.dataset == PROMPTS)
    layout = Layout(order)
    record = read_record(layout.record)
    if (
        plan.lock
        and weights
        and not stale_prompts
        and record is not None
        and record.wanted == wanted
        and layout.weights.is_file()
        and (folder / "trained.json").is_file()
        and are_drawn(order, wanted)
    ):
        return
    path = run_order(plan.name, "train", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    plan.training_order = path


def _resumed(facts: Facts, trainer: SdTrainer, folder: Path) -> str:
    """Return the digest of the checkpoint that a training begins with.

    One that is gone, because its own run was trained again, makes no weights stale that came of it.
    """
    if trainer.resume_from_checkpoint is None:
        return ""
    place = Path(trainer.resume_from_checkpoint)
    record = read_record(folder / "training.json")
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
