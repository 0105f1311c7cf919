"""The trainer `sd` as a backend: the order of a run, checked as far as its network is known."""

from __future__ import annotations

from pathlib import Path

from latentmake.config.root import Config
from latentmake.config.trainers import SdTrainer
from latentmake.errors import ModelError, TrainingError
from latentmake.models import checkpoints
from latentmake.plan.facts import Facts
from latentmake.training.loop.plan import LoopBackend, order_values
from latentmake.training.sd.order import SdOrder
from latentmake.training.sd.unet import (
    check_names,
    parameter_names,
    read_schedule,
    schedule_of,
    training_digest,
)

_CAPTIONS = 4  # drawn where a run names no prompts


class Sd(LoopBackend):
    """The trainer `sd`."""

    order_type = SdOrder

    def order(self, facts: Facts, run: str) -> SdOrder:
        """Return the order of a run."""
        trainer = facts.config.runs[run].trainer
        assert isinstance(trainer, SdTrainer)
        _check_network(facts.config, run, trainer)
        return _order(facts, run, trainer)


def _check_network(config: Config, name: str, trainer: SdTrainer) -> None:
    """Refuse settings that do not fit the UNet or its noise schedule, as far as these are known."""
    key, where = config.runs[name].model, f"runs.{name}.trainer"
    model = config.models[key]
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    if checkpoints.part_of(model.unet) == "unet":
        path = Path(model.unet.path or "")
        if "addition_embed_type" in checkpoints.config_of(model.unet):
            what = f"{path} is a checkpoint of SDXL, which the trainer sd does not train"
            hint = "use kind: sdscripts, or name a checkpoint of Stable Diffusion 1.x or 2.x"
            raise ModelError(what, where=f"models.{key}.checkpoint", hint=hint)
        is_sd2 = checkpoints.kind_of(checkpoints.tensors_in(path)) == "sd2"
        if is_sd2 and scheduler == str(checkpoints.SCHEDULE) and trainer.prediction_type is None:
            what = f"this key is missing: {path} does not say what Stable Diffusion 2.x predicts"
            hint = "use v_prediction for 2.1 of 768 pixels, epsilon for the base models of 512"
            raise TrainingError(what, where=f"{where}.prediction_type", hint=f"{hint} pixels")
    if (names := parameter_names(model.unet)) is not None:
        check_names(trainer, names, where)
    if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
        read_schedule(scheduler, trainer.prediction_type)


def _order(facts: Facts, name: str, trainer: SdTrainer) -> SdOrder:
    key = facts.config.runs[name].model
    model = facts.config.models[key]
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    try:
        read, projection = facts.memo.digest_of_file, model.text_projection
        weights = training_digest(model.unet, scheduler, read, text_projection=projection)
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{key}.unet", hint=error.hint
        ) from None
    return SdOrder(
        unet=model.unet,
        weights=weights,
        text_projection=model.text_projection,
        scheduler=scheduler,
        captions=0 if trainer.samples.prompts else _CAPTIONS,
        **order_values(facts, name, trainer),
    )
