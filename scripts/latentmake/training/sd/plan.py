"""Plan of a run of the trainer `sd`: its order, and whether it is trained."""

from __future__ import annotations

import time
from pathlib import Path

from latentmake.config import Model, Run, SdTrainer
from latentmake.errors import ModelError
from latentmake.models import recipe
from latentmake.models.checks import check_names, parameter_names, read_schedule, schedule_of
from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan, prompt_path, run_folder
from latentmake.training.loop.order import Prompt
from latentmake.training.loop.plan import finish_plan, resumed, text_schedules
from latentmake.training.sd.order import SdOrder

_CAPTIONS = 4  # drawn where a run names no prompts


def plan_training(facts: Facts, plan: RunPlan, *, train: bool) -> None:
    """Write the order of a run, and decide whether it is to be trained; see `Backend.plan`."""
    run = facts.config.runs[plan.name]
    trainer = run.trainer
    assert isinstance(trainer, SdTrainer)
    _check_network(trainer, facts.config.models[run.model], f"runs.{plan.name}.trainer")
    order = _order(facts, plan.name, run, trainer)
    finish_plan(facts, plan, order, train=train)


def _check_network(trainer: SdTrainer, model: Model, where: str) -> None:
    """Refuse settings that do not fit the UNet or its noise schedule, as far as these are known."""
    assert model.unet is not None
    if (names := parameter_names(model.unet)) is not None:
        check_names(trainer, names, where)
    scheduler = schedule_of(model.unet, model.scheduler)
    if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
        read_schedule(scheduler, trainer.prediction_type)


def _order(facts: Facts, name: str, run: Run, trainer: SdTrainer) -> SdOrder:
    model, folder = facts.config.models[run.model], run_folder(name)
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    try:
        read, projection = facts.memo.digest_of_file, model.text_projection
        weights = recipe.training_digest(model.unet, scheduler, read, text_projection=projection)
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{run.model}.unet", hint=error.hint
        ) from None
    samples, size = trainer.samples, trainer.samples.resolution or run.resolutions[0]
    guided = samples.guidance_scale > 1
    return SdOrder(
        run=name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        unet=model.unet,
        weights=weights,
        resumed=resumed(facts, trainer, folder),
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
        texts=text_schedules(facts, run),
        planned=time.time_ns(),
    )
