"""The trainer `sd` as a backend: the order of a run, checked as far as its network is known."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.errors import ModelError, TrainingError
from latentmake.models import headers
from latentmake.models.files import network_config
from latentmake.plan.facts import Facts
from latentmake.training.loop.order import CAPTIONS
from latentmake.training.loop.plan import LoopBackend, order_values
from latentmake.training.sd.unet import (
    PLACES,
    XL,
    SdOrder,
    check_conditions,
    check_names,
    lora_layers,
    made_of,
    parameter_names,
    read_schedule,
    schedule_of,
    training_digest,
)

if TYPE_CHECKING:
    from latentmake.training.sd.recipe import SdRecipe


class Sd(LoopBackend):
    """The trainer `sd`."""

    order_type = SdOrder
    memory_hint = (
        "lower `train_batch_size` (and raise `gradient_accumulation_steps`), set "
        "`gradient_checkpointing: true` or `mixed_precision: bf16`"
    )

    def order(self, facts: Facts, run: str) -> SdOrder:
        """Return the order of a run, whose settings fit the network as far as that is known."""
        key, trainer = facts.config.runs[run].model, facts.config.runs[run].trainer
        model = facts.config.models[key]
        assert isinstance(trainer, SdTrainer) and model.unet is not None
        scheduler, projection = schedule_of(model.unet, model.scheduler), model.text_projection
        config = None
        with suppress(ModelError):  # its digest says so
            config = network_config(model.unet)
        if config is not None:
            check_conditions(config, model.architecture, len(model.text), f"models.{key}.unet")
        names = parameter_names(model.unet)
        _check_network(model.unet, names, scheduler, trainer, f"runs.{run}.trainer")
        try:
            read = facts.memo.digest_of_file
            weights = training_digest(model.unet, scheduler, read, text_projection=projection)
        except ModelError as error:
            what = f"{error.where}: {error.what}"
            raise ModelError(what, where=f"models.{key}.unet", hint=error.hint) from None
        order = SdOrder(
            weights=weights,
            captions=0 if trainer.samples.prompts else CAPTIONS,
            **order_values(facts, run, trainer),
        )
        layers = None
        if names is not None and model.architecture != XL:  # whose places only diffusers knows
            layers = lora_layers(trainer.target_modules, names)
        return order.begun(facts.memo.digest_of_file, [layers], PLACES)

    def recipe(self, order: SdOrder) -> SdRecipe:
        """Return the recipe of an order."""
        from latentmake.training.sd.recipe import SdRecipe

        return SdRecipe(order)

    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of all networks that draw; pictures have no settings of their own."""
        model = facts.config.models[facts.config.runs[training.run].model]
        return made_of(training, model, facts.memo.digest_of_file), {}


def _check_network(
    unet: Weights, names: list[str] | None, scheduler: str, trainer: SdTrainer, where: str
) -> None:
    """Refuse settings that do not fit the UNet or its noise schedule, as far as these are known.

    `names` are those of the UNet's parameters.
    """
    if headers.part_of(unet) == "unet":
        path = Path(unet.path or "")
        is_sd2 = headers.kind_of(headers.tensors_in(path)) == "sd2"
        if is_sd2 and scheduler == str(headers.SCHEDULE) and trainer.prediction_type is None:
            what = f"this key is missing: {path} does not say what Stable Diffusion 2.x predicts"
            hint = "use v_prediction for 2.1 of 768 pixels, epsilon for the base models of 512"
            raise TrainingError(what, where=f"{where}.prediction_type", hint=f"{hint} pixels")
    if names is not None:
        check_names(trainer, names, where)
    if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
        read_schedule(scheduler, trainer.prediction_type)
