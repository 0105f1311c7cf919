"""What is written into a published folder: dataset TOML and commands, in each system's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from latentmake.config import Weights
from latentmake.errors import ConfigError
from latentmake.files.paths import System
from latentmake.training.external.arguments import accelerate_arguments, located
from latentmake.training.external.launch_scripts import Commands, Step
from latentmake.training.external.musubi import command
from latentmake.training.external.musubi.dataset_toml import dataset_toml
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.publish import Names, block_names, launch_options

__all__ = ["Texts"]


def _step(what: str, script: str, arguments: list[str] | None) -> Step:
    without = f"No step for {what}: musubi-tuner's script wants one file of weights, not a folder."
    return Step(what, script, arguments, without)


class Texts:
    """What is written into the published folder, in the paths of each system.

    Attributes:
        blocks: (dataset, resolution) -> the folder of its images, below the published folder.
        names: the paths that were asked for.
        left_out: key of the model -> why the scripts cannot read its weights.
    """

    def __init__(self, order: MusubiOrder, published: str) -> None:
        self.order = order
        self.published = published
        self.blocks = block_names(order)
        self.left_out: dict[str, str] = {}
        where = f"models.{order.model_name}"
        if order.musubi_tuner is None:
            raise ConfigError(
                "this key is missing",
                where="musubi_tuner",
                mend="set musubi_tuner.path to its folder, which the published scripts go to",
            )
        if order.model.dit is None:
            raise ConfigError(
                "this key is missing", where=f"{where}.dit", mend="name the network to be trained"
            )
        self.tuner, self.dit = order.musubi_tuner, order.model.dit
        self.vae = self._weights(order.model.vae, f"{where}.vae", "the latents")
        self.t5 = self._weights(order.model.text[0], f"{where}.text", "the captions")
        self.clip: str | None = None
        if order.model.clip is not None:
            self.clip = self._weights(order.model.clip, f"{where}.clip", "the latents")
            if self.clip is None:
                self.vae = None  # the latents' script needs both
        self.names = Names(order, published)

    @property
    def attention(self) -> str:
        """The attention of the trainer's machine, which cannot be asked for the fastest."""
        trainer = self.order.trainer.attention
        return self.order.publish.attention or ("sdpa" if trainer == "auto" else trainer)

    def _weights(self, weights: Weights, where: str, what: str) -> str | None:
        """Return the path of one file of weights; None of a folder, which is told."""
        if weights.path is None:
            raise ConfigError(
                f"{weights.hub} lies on the hub, and a published script needs a file",
                where=where,
                mend="download the original weights, and set `path` to their file",
            )
        if Path(weights.path).is_dir():
            if not self.order.publish.caches:
                raise ConfigError(
                    f"{weights.path} is a folder, and musubi-tuner's scripts want a single file",
                    where=where,
                    mend="name the file of the original weights, or set `publish.caches: true`",
                )
            self.left_out[where.rpartition(".")[2]] = (
                f"{weights.path} is a folder, and musubi-tuner's scripts want a single file: the "
                f"published scripts train from the caches and do not cache {what}"
            )
            return None
        return weights.path

    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system, with forward slashes."""

        def directory(ending: str) -> Callable[[str, tuple[int, int]], str]:
            return lambda dataset, resolution: self.names.named(
                f"{self.published}/{self.blocks[dataset, resolution]}{ending}",
                system,
                self.published,
            )

        return dataset_toml(
            self.order,
            image_directory=directory(""),
            cache_directory=directory("_cache"),
            control_directory=directory("_control"),
        )

    def commands(self, system: System) -> Commands:
        """Return what the script of one system does."""
        order, trainer = self.order, self.order.trainer
        config = self.names.below(
            f"{order.run}_{'win' if system == 'windows' else 'linux'}.toml", system
        )
        latents = text = high_noise = accelerate = None
        caching: dict[str, Any] = {
            "dataset_config": config,
            "batch_size": order.publish.batch_size,
            "num_workers": order.publish.num_workers,
            "keep_cache": order.publish.caches,
        }
        if self.vae is not None:
            latents = command.latents_arguments(
                order.model,
                vae=self.names.argument(self.vae, system),
                clip=None if self.clip is None else self.names.argument(self.clip, system),
                **caching,
            )
        if self.t5 is not None:
            text = command.text_arguments(
                order.model, t5=self.names.argument(self.t5, system), **caching
            )
        if order.model.dit_high_noise is not None:
            high_noise = self.names.argument(command.first_file(order.model.dit_high_noise), system)
        if trainer.accelerate_config is not None:
            accelerate = self.names.argument(trainer.accelerate_config, system)
        venvs = ["venv", ".venv"]
        if self.tuner.venv is not None:
            venvs = [self.names.argument(self.tuner.venv, system, self.tuner.venv)]
        training = command.training_arguments(
            located(order, lambda path: self.names.argument(path, system)),
            dataset_config=config,
            dit=self.names.argument(command.first_file(self.dit), system),
            dit_high_noise=high_noise,
            output_dir=self.names.below("output", system),
            logging_dir=self.names.below("logs", system),
            attention=self.attention,
        )
        accelerated = accelerate_arguments(trainer.mixed_precision, config=accelerate)
        return Commands(
            run=order.run,
            does=f"Caches what is missing of run {order.run} and trains it with musubi-tuner.",
            program="musubi-tuner",
            folder=self.names.argument(self.tuner.path, system, self.tuner.path),
            package="src/musubi_tuner",
            venvs=venvs,
            steps=[
                _step("caching the latents", command.LATENTS_SCRIPT, latents),
                _step("caching the captions", command.TEXT_SCRIPT, text),
            ],
            accelerate=[*accelerated, *launch_options(order)],
            script=command.TRAINING_SCRIPT,
            training=training,
        )
