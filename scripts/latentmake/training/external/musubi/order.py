"""Order of a run of musubi-tuner, and musubi-tuner's installation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from latentmake import digest
from latentmake.config.architectures import Scripts, Setting
from latentmake.config.external_trainers import MusubiTrainer, shaping_settings
from latentmake.config.fields import resolution_name, shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.errors import TrainingError
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout, layout_of
from latentmake.models.files import scripted_files
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.order import ExternalOrder, Resume, depends_on_length

DEPLOYED = "caches"
"""Folder of links to caches, below that of a run."""


class MusubiOrder(ExternalOrder):
    """Order of a run of musubi-tuner.

    Attributes:
        trainer: the defaults where the run has none.
        musubi_tuner: where musubi-tuner lies; None where the configuration does not say.
    """

    name = "musubi-tuner"
    section = "musubi_tuner"
    memory_hint = "try fp8_base, a smaller resolution, or `arguments: [--blocks_to_swap, 20]`"
    kind: Literal["musubi"] = "musubi"
    trainer: MusubiTrainer
    musubi_tuner: ExternalProgram | None

    @staticmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        assert model.spec.scripts is not None
        return model.spec.scripts.settings

    def find(self, memory: Memo | None = None) -> Installation:
        if self.musubi_tuner is None:
            note = "the configuration does not say where it lies: set `musubi_tuner.path`"
            raise TrainingError(note)
        return find(self.musubi_tuner, self.scripts, memory)

    def weights_digest(self, file_digest: Callable[[Path], str]) -> str:
        networks = filter(None, (self.model.dit, self.model.dit_high_noise))
        return digest.of_value([[*map(file_digest, self._files(Path(x)))] for x in networks])

    def _files(self, path: Path) -> list[Path]:
        """Return the files of a network: of a folder, or the shards that one file stands for."""
        if path.is_dir():
            return sorted(path.glob("*.safetensors"))
        if self.model.architecture is None:  # one file, as in all records of Wan
            return [path]
        return scripted_files(path)

    @property
    def toml(self) -> str:
        return "dataset.toml"

    @property
    def lora_module(self) -> str:
        return self.scripts.network

    @property
    def beginning(self) -> str:  # in each of its modules networks/lora*.py
        return "lora_unet_" if self.network["--network_module"] == self.lora_module else ""

    @property
    def epochs(self) -> int | None:
        return self.trainer.max_train_epochs if self.trainer.max_train_steps is None else None

    def can_resume(self, resume: Resume) -> bool:
        if self.epochs is None:  # its states do not say how many steps are left
            return False
        return resume.counted or not depends_on_length(self.trainer.arguments)

    @property
    def scripts(self) -> Scripts:
        """musubi-tuner's scripts for the model's architecture."""
        scripts = self.model.spec.scripts
        assert scripts is not None  # or the configuration had been refused
        return scripts

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
        own = shaping_settings(self.trainer, self.lora_module)
        for key in ("seed", "max_train_steps"):  # which records of earlier releases do not have
            if own[key] is None:
                del own[key]
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
    """Find the scripts of an architecture in a folder of musubi-tuner; raises TrainingError."""
    name, section, script = MusubiOrder.name, MusubiOrder.section, scripts.training.name
    knows = f"a musubi-tuner that knows {scripts.title}"
    program = Program(name, section, "src/musubi_tuner", script, knows)
    return Installation.locate(program, settings.path, settings.venv, memory)
