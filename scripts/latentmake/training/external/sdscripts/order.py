"""Order of a run of sd-scripts, and sd-scripts' installation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from latentmake import digest
from latentmake.config.architectures import ArchitectureName, Strategies
from latentmake.config.external_trainers import SdScriptsTrainer, TrainingScript
from latentmake.config.fields import shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.index.memo import Memo
from latentmake.models.recipe import encoder_of
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.order import ExternalOrder


class SdScriptsOrder(ExternalOrder):
    """Order of a run of sd-scripts."""

    kind: Literal["sdscripts"] = "sdscripts"
    trainer: SdScriptsTrainer
    sd_scripts: ExternalProgram

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
