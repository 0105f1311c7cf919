"""Order of a run of sd-scripts, and sd-scripts' installation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from latentmake import digest
from latentmake.config.architectures import ArchitectureName, Setting, Strategies
from latentmake.config.external_trainers import SdScriptsTrainer, TrainingScript
from latentmake.config.fields import shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.index.memo import Memo
from latentmake.models.recipe import encoder_of
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.order import (
    ExternalOrder,
    Resume,
    depends_on_length,
    files_digests,
)

_EPOCHS = 10  # where neither epochs nor steps are asked for
_WEIGHTS = (".safetensors", ".bin", ".ckpt")


class SdScriptsOrder(ExternalOrder):
    """Order of a run of sd-scripts."""

    name = "sd-scripts"
    section = "sd_scripts"
    memory_hint = "try gradient_checkpointing, a smaller train_batch_size or a smaller resolution"
    kind: Literal["sdscripts"] = "sdscripts"
    trainer: SdScriptsTrainer
    sd_scripts: ExternalProgram

    @staticmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        row = model.spec.strategies
        assert row is not None
        return row.recommended(trainer.script or row.scripts[0])

    def find(self, memory: Memo | None = None) -> Installation:
        return find(self.script, self.sd_scripts, memory)

    def weights_digest(self, file_digest: Callable[[Path], str]) -> str:
        place = self.model.checkpoint or ""
        files = [path := Path(place)]
        if path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.suffix in _WEIGHTS)
        return digest.of_value(files_digests("checkpoint", place, files, file_digest))

    @property
    def epochs(self) -> int | None:
        trainer = self.trainer
        if trainer.max_train_steps is not None:
            return None
        return _EPOCHS if trainer.max_train_epochs is None else trainer.max_train_epochs

    @property
    def counts(self) -> bool:
        return self.script.endswith("_network")

    def can_resume(self, resume: Resume) -> bool:
        """Whether a training resumed from a state takes just the steps that are left.

        Scripts that train a LoRA note in a state how far it came, and count epochs on from the step
        that they are told; but the last epoch is then trained to its end, whatever the number of
        steps. Those that train a complete network count from one again, and cannot end at once.
        """
        trainer, epochs = self.trainer, self.epochs
        if resume.counted:
            steps = trainer.max_train_steps or (epochs or 0) * resume.steps
            return 0 < resume.steps * resume.done < steps and steps % resume.steps == 0
        endless = not depends_on_length(trainer.arguments, trainer.lr_scheduler)
        return epochs is not None and resume.done < epochs and endless

    @property
    def result(self) -> str:
        return "network" if self.script in self.strategies.complete else "LoRA"

    def packages(self, program: Installation) -> set[str]:
        needs = super().packages(program)
        needs |= {"xformers"} if self.trainer.attention == "xformers" else set()
        return needs | ({"deepspeed"} if self.trainer.deepspeed else set())

    @property
    def architecture(self) -> ArchitectureName:
        """Which model is trained."""
        assert self.model.architecture is not None
        return self.model.architecture

    @property
    def strategies(self) -> Strategies:
        """What sd-scripts knows about it."""
        assert self.model.spec.strategies is not None
        return self.model.spec.strategies

    @property
    def script(self) -> TrainingScript:
        """Which of its scripts trains it."""
        return self.trainer.script or self.strategies.scripts[0]

    @property
    def cached_text(self) -> bool:
        """Whether its text is cached; else sd-scripts encodes captions while it trains."""
        return self.model.spec.caches_text

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        trainer, model = shaping(self.trainer, "weights"), self.model
        del trainer["script"]  # whose default follows from the architecture
        own = [trainer, self.script, self.architecture, model.clip_skip, model.max_token_length]
        further = [*model.latents_arguments, *model.text_arguments]
        return digest.of_value([*own, *([further] if further else []), *sorted(self.flags.items())])

    def settings(self) -> dict[str, object]:
        """Return the same by name."""
        keys = ("clip_skip", "max_token_length", "latents_arguments", "text_arguments")
        model = {"architecture": self.architecture} | {x: getattr(self.model, x) for x in keys}
        return {**shaping(self.trainer, "weights"), "script": self.script, **model, **self.flags}


def find(script: str, settings: ExternalProgram, memory: Memo | None = None) -> Installation:
    """Find a training script, named without its ending; raises TrainingError."""
    name = f"{script}.py"
    program = Program("sd-scripts", "sd_scripts", "", name, f"an sd-scripts that has {name}")
    return Installation.locate(program, settings.path, settings.venv, memory)


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of the sources that encode `latents` or `text`: its own, no packages.

    Raises:
        TrainingError: the folder, its modules, or the Python of its environment are missing.
    """
    strategies, encoder = model.spec.strategies, encoder_of(model, kind)
    assert strategies is not None
    installation = find(strategies.scripts[0], settings, memory)
    modules = [f"{module.replace('.', '/')}.py" for module in encoder.modules]
    for module in modules:
        installation.script(module)
    folders = [installation.folder / each for each in encoder.folders]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    sources = [installation.sources_of(module) for module in modules]
    beside = [_digest(file, memory) for file in files]
    return digest.of_value([*(each.digest for each in sources), *beside])


def _digest(file: Path, memory: Memo | None) -> str:
    return digest.of_file(file) if memory is None else memory.digest_of_file(file)
