"""Order of a run of musubi-tuner, and search for its installation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from latentmake.base import digest
from latentmake.config.external_trainers import MusubiTrainer, shaping_settings
from latentmake.config.fields import resolution_name, shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.makers import Scripts, Setting
from latentmake.config.models import Model
from latentmake.data.memo import Memo
from latentmake.layouts.layout import Layout, layout_of
from latentmake.models.files import scripted_files
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.order import ExternalOrder, Resume, depends_on_length

_UNUSED = ("networks",)  # code of LoRAs: loaders of weights import it, caching scripts use none
DEPLOYED = "caches"
"""Folder of links to caches, below the folder of a run."""


class MusubiOrder(ExternalOrder):
    """Order of a run of musubi-tuner.

    Attributes:
        trainer: section of the trainer; all defaults if the run has none.
    """

    name = "musubi-tuner"
    section = "musubi_tuner"
    memory_hint = "try fp8_base, a smaller resolution, or `arguments: [--blocks_to_swap, 20]`"
    toml_name = "dataset.toml"
    kind: Literal["musubi"] = "musubi"
    trainer: MusubiTrainer

    @staticmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        return model.spec.settings

    def find(self, memory: Memo | None = None) -> Installation:
        return find(self.program, self.scripts, memory)

    def weights_digest(self, file_digest: Callable[[Path], str]) -> str:
        networks = filter(None, (self.model.dit, self.model.dit_high_noise))
        return digest.of_value([[*map(file_digest, self._files(Path(path)))] for path in networks])

    def _files(self, path: Path) -> list[Path]:
        """Return all files of a network: the files of a folder, or the shards of one file."""
        if path.is_dir():
            return sorted(path.glob("*.safetensors"))
        if self.model.architecture is None:  # Wan: records always had the digest of one file
            return [path]
        return scripted_files(path)

    @property
    def beginning(self) -> str:  # all of musubi-tuner's networks/lora*.py use this prefix
        return "lora_unet_" if self.network["--network_module"] == self.lora_module else ""

    def can_resume(self, resume: Resume) -> bool:
        if self.epochs is None:  # states do not record how many steps are left
            return False
        return resume.counted or not depends_on_length(self.trainer.arguments)

    @property
    def scripts(self) -> Scripts:
        """Scripts of musubi-tuner for the model's architecture."""
        return self.model.spec.scripts

    @property
    def attentions(self) -> set[str]:
        """Attentions that the network supports at the trainer's batch size."""
        size, splits = self.trainer.batch_size, "--split_attn" in self.trainer.arguments
        limits = self.scripts.attentions.items()
        return {name for name, limit in limits if limit is None or size <= limit or splits}

    @property
    def layout(self) -> Layout:
        """Layout of the caches."""
        return layout_of(self.model.layout_name)

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        own = shaping_settings(self.trainer, self.lora_module)
        for key in ("seed", "max_train_steps"):  # records of earlier releases lack these keys
            if own[key] is None:
                del own[key]
        settings: list[object] = [own, self.model.task]
        if self.model.architecture is not None:  # for a Wan model the task is enough
            settings.append(self.model.architecture)
        return digest.of_value([*settings, *sorted(self.flags.items())])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the trained weights, by name."""
        model = {"task": self.model.task, "architecture": self.model.architecture}
        return {**shaping(self.trainer, "weights"), **model, **self.flags}

    def cache_folder(self, dataset: str, resolution: tuple[int, int]) -> str:
        """Return the folder of a dataset's caches at one resolution."""
        return self.layout.folder(dataset, self.model_name, resolution_name(*resolution))

    def training_folder(self, dataset: str, resolution: tuple[int, int]) -> str:
        """Return the folder that musubi-tuner trains on: the caches, or links to them.

        Links are needed if items have several texts, because each text becomes an item of its own;
        see `deploy`.
        """
        if self.datasets[dataset].text_variants == 1:
            return self.cache_folder(dataset, resolution)
        return f"{self.output}/{DEPLOYED}/{dataset}_{resolution_name(*resolution)}"


def find(
    settings: ExternalProgram | None, scripts: Scripts, memory: Memo | None = None
) -> Installation:
    """Find an architecture's scripts in musubi-tuner's folder; raises TrainingError."""
    needed = f"a musubi-tuner that knows {scripts.title}"
    name = scripts.training.name
    return Installation.locate(MusubiOrder.section, settings, name, needed, memory)


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of musubi-tuner's sources that encode `latents` or `text` of a model.

    Raises:
        TrainingError: musubi-tuner or the script is missing.
    """
    scripts = model.spec.scripts
    installation, name = find(settings, scripts, memory), scripts.caching(kind).name
    installation.script(name)
    # The recipes of Wan's caches have always included all imports: to exclude some now would make
    # these caches stale.
    without = () if model.spec.encodes else _UNUSED
    _, _, content = installation.sources_of(name, without)
    return content
