"""Order of a run of musubi-tuner."""

from __future__ import annotations

from typing import Literal

from latentmake import digest
from latentmake.config.architectures import Scripts, Version
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.fields import resolution_name, shaping
from latentmake.config.machines import ExternalProgram
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout, layout_of
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.order import ExternalOrder

DEPLOYED = "caches"
"""Folder of links to caches, below that of a run."""


class MusubiOrder(ExternalOrder):
    """Order of a run of musubi-tuner.

    Attributes:
        trainer: the defaults where the run has none.
        musubi_tuner: where musubi-tuner lies; None where the configuration does not say.
    """

    kind: Literal["musubi"] = "musubi"
    trainer: MusubiTrainer
    musubi_tuner: ExternalProgram | None

    @property
    def scripts(self) -> Scripts:
        """musubi-tuner's scripts for the model's architecture."""
        scripts = self.model.spec.scripts
        assert scripts is not None  # or the configuration had been refused
        return scripts

    @property
    def version(self) -> Version:
        """Version that the model's `task` names."""
        return self.model.version

    @property
    def attentions(self) -> set[str]:
        """Attentions of the network for batches of the trainer's size."""
        size, splits = self.trainer.batch_size, "--split_attn" in self.trainer.arguments
        known = self.scripts.attentions.items()
        return {name for name, most in known if most is None or size <= most or splits}

    @property
    def layout(self) -> Layout:
        """Names of the caches."""
        return layout_of(self.model.layout_name)

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        own = shaping(self.trainer, "weights")
        if self.trainer.seed is None:  # as in all records of earlier releases
            del own["seed"]
        settings: list[object] = [own, self.model.task]
        if self.model.architecture is not None:  # a Wan model is known by its task alone
            settings.append(self.model.architecture)
        return digest.of_value([*settings, *sorted(self.flags.items())])

    def settings(self) -> dict[str, object]:
        """Return the same by name."""
        model = {"task": self.model.task, "architecture": self.model.architecture}
        return {**shaping(self.trainer, "weights"), **model, **self.flags}

    def cache_folder(self, dataset: str, resolution: tuple[int, int]) -> str:
        """Return the folder of one dataset's caches at one resolution."""
        return self.layout.folder(dataset, self.model_name, resolution_name(*resolution))

    def training_folder(self, dataset: str, resolution: tuple[int, int]) -> str:
        """Return the folder that is trained on: that of the caches, or of links to them.

        Where items have several texts, each text makes an item of links: see `deploy`.
        """
        if self.datasets[dataset].text_variants == 1:
            return self.cache_folder(dataset, resolution)
        return f"{self.output}/{DEPLOYED}/{dataset}_{resolution_name(*resolution)}"


def find(settings: ExternalProgram, scripts: Scripts, memory: Memo | None = None) -> Installation:
    """Find the scripts of an architecture and the Python of a musubi-tuner folder.

    Raises:
        TrainingError: the folder, the training script, or the Python of its environment is missing.
    """
    program = Program(
        name="musubi-tuner",
        section="musubi_tuner",
        package="src/musubi_tuner",
        script=scripts.training.name,
        knows=f"a musubi-tuner that knows {scripts.title}",
    )
    return Installation.locate(program, settings.path, settings.venv, memory)
