"""Backend of the trainer `sd`: make the order of a run, and check it against the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from latentmake.base.errors import ModelError
from latentmake.config.trainers import SdTrainer
from latentmake.models.files import network_config
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.trainers.loop.order import CAPTIONS, lora_layers
from latentmake.trainers.loop.plan import LoopBackend, order_values
from latentmake.trainers.sd.unet import (
    SdOrder,
    check_conditions,
    check_names,
    made_of,
    parameter_names,
    parameterization_of,
    places_of,
    shapes_of,
    start_of,
)

if TYPE_CHECKING:
    from latentmake.config.root import Config
    from latentmake.runs.findings import Finding
    from latentmake.trainers.sd.recipe import SdRecipe


class Sd(LoopBackend):
    """Backend of the trainer `sd`."""

    order_type = SdOrder
    memory_hint = (
        "lower `train_batch_size` (and raise `gradient_accumulation_steps`), set "
        "`gradient_checkpointing: true` or `mixed_precision: bf16`"
    )

    def order(self, facts: Facts, run: str) -> SdOrder:
        """Return the order of a run; check its settings against the network's files, if they exist.

        Raises:
            ModelError: the network cannot be trained with the model's caches, or is missing.
            TrainingError: settings name layers or parts that the UNet does not have.
        """
        key, trainer = facts.config.runs[run].model, facts.config.runs[run].trainer
        model, where = facts.config.models[key], f"runs.{run}.trainer"
        assert isinstance(trainer, SdTrainer) and model.unet is not None
        config = None
        with suppress(ModelError):  # the digest will report the error
            config = network_config(model.unet)
        if config is not None:
            check_conditions(config, model.architecture, len(model.text), f"models.{key}.unet")
        names = parameter_names(model.unet)
        if names is not None:
            check_names(trainer, names, where)
        try:
            weights, chosen = start_of(model, trainer, where, facts.memo.digest_of_file)
        except ModelError as error:
            if str(error.where).startswith(where):
                raise
            what = f"{error.where}: {error.what}"
            raise ModelError(what, where=f"models.{key}.unet", hint=error.hint) from None
        if chosen is not None:
            # Facts in the scheduler's own file set no key: its digest covers them already.
            trainer = trainer.model_copy(update=chosen.told)
        order = SdOrder(
            weights=weights,
            captions=0 if trainer.samples.prompts else CAPTIONS,
            **order_values(facts, run, trainer),
        )
        if not order.init_files:
            return order
        shapes = shapes_of(model.unet)
        targets = lora_layers(trainer.target_modules, shapes or names or ())
        layers = {layer: shapes.get(f"{layer}.weight", ()) for layer in targets} or None
        return order.begun(facts.memo.digest_of_file, [layers], places_of(config))

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Plan a training; note the prediction and schedule that come from the network's files."""
        super().plan(facts, plan, train=train)
        order, written = plan.trainer, facts.config.runs[plan.name].trainer
        assert isinstance(order, SdOrder) and isinstance(written, SdTrainer)
        keys = ("prediction_type", "zero_terminal_snr")
        if plan.reasons and any(
            getattr(order.trainer, key) != getattr(written, key) for key in keys
        ):
            note = f"training of {plan.name}: {parameterization_of(order.model, written)}"
            plan.note = "; ".join(filter(None, (plan.note, note)))

    def recipe(self, order: SdOrder) -> SdRecipe:
        """Return the recipe of an order."""
        from latentmake.trainers.sd.recipe import SdRecipe

        return SdRecipe(order)

    def check_network(self, config: Config, run: str) -> str:
        """Return a UNet's prediction in words, if it differs from its scheduler's file; else ""."""
        trainer, model = config.runs[run].trainer, config.models[config.runs[run].model]
        assert isinstance(trainer, SdTrainer)
        _, chosen = start_of(model, trainer, f"runs.{run}.trainer", lambda _: "")
        return str(chosen) if chosen and chosen.told else ""

    def check(self, order: SdOrder, *, current: bool) -> Iterator[Finding]:
        """Check the needs of the settings, and report the network's prediction."""
        from latentmake.runs.findings import parameterization_findings

        yield from super().check(order, current=current)
        unset = {"prediction_type": None, "zero_terminal_snr": None}
        files_only = order.trainer.model_copy(update=unset)
        yield from parameterization_findings(
            order.model,
            lambda keys: parameterization_of(order.model, order.trainer if keys else files_only),
        )

    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of all networks that sample pictures, and no further settings."""
        return made_of(training, facts.memo.digest_of_file), {}
