"""Order of a run of sd-scripts."""

from __future__ import annotations

from typing import Literal

from latentmake import digest
from latentmake.config.architectures import ArchitectureName
from latentmake.config.external_trainers import SdScriptsTrainer, TrainingScript
from latentmake.config.fields import shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.rows import Strategies
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
