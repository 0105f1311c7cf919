"""The root of `config.yaml`, and its validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from latentmake.config.checks import faults_of_run
from latentmake.config.datasets import Dataset
from latentmake.config.fields import CLIPS, Closed, Name, shaped
from latentmake.config.machines import (
    Batch,
    Cluster,
    Export,
    ExternalProgram,
    MusubiTuner,
    Publish,
    Store,
)
from latentmake.config.models import Model
from latentmake.config.runs import Run
from latentmake.config.trainers import Generation, Prompt
from latentmake.errors import ConfigError, refuse_unknown

_MISTAKES = 50  # that are named at a time
# Snakemake makes a number of `--config prompt=...` where it can.
_AS_TEXT = BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)


class Config(Closed):
    """The root of `config.yaml`."""

    datasets: dict[Name, Dataset] = Field(min_length=1)
    """[Datasets](datasets.md): folders of captioned images or videos, by their names."""
    models: dict[Name, Model] = Field(min_length=1)
    """[Models](models.md): encoders and the network to train, by their names."""
    runs: dict[Name, Run] = Field(min_length=1)
    """[Runs](runs.md): datasets, a model, resolutions and a trainer, by their names."""
    batch: Batch = Batch()
    """[Size of encoding jobs](batch.md)."""
    cluster: Cluster = Cluster()
    """[Resources of SLURM jobs](cluster.md); ignored without a profile for a cluster."""
    musubi_tuner: MusubiTuner | None = None
    """[Installation of musubi-tuner](musubi_tuner.md), which encodes and trains Wan and other
    models."""
    sd_scripts: ExternalProgram | None = None
    """[Installation of sd-scripts](sd_scripts.md), which trains models with `layout: sdscripts`."""
    publish: Publish = Publish()
    """[Content and place](publish.md) of the folders that `publish_{run}` makes."""
    export: Export = Export()
    """[Place](export.md) of the caches that `export_{run}` writes for ai-training."""
    store: Store = Store()
    """[Size limit](store.md) for replaced and removed cache files that are kept."""
    prompt: Annotated[Prompt | None, _AS_TEXT] = shaped(None, CLIPS)
    """A prompt for `generate_{run}`, meant for the command line: `snakemake generate_cats --config
    prompt="a boat on a lake"` draws clips of this prompt instead of those of
    [`generate`](generate.md). Clips of other prompts stay in the folder and on its page, if their
    weights and settings are still the same."""

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, run in self.runs.items():
            self.check_run(name, run)
        for name, dataset in self.datasets.items():
            models = {run.model for run in self.runs.values() if name in run.datasets}
            layouts = {self.models[model].layout for model in models}
            shapes = Dataset.declarations
            idle = [key for key in shapes if layouts.isdisjoint(shapes[key].layouts or layouts)]
            if models and (key := dataset.first_set(*idle)):
                what = f"only caches of the layout {' or '.join(shapes[key].layouts)} depend on "
                what += f"this, and {', '.join(sorted(models))} has others"
                raise ConfigError(what, where=f"datasets.{name}.{key}", hint="leave it out")
        return self

    def encoding_program(self, model: Model) -> ExternalProgram | None:
        """Return the program that encodes for a model; None where our encoders do."""
        programs = {"musubi": self.musubi_tuner, "sdscripts": self.sd_scripts}
        return programs.get(model.encoder)

    def generation(self, run: Run) -> Generation:
        """Return the settings of a run's clips, with the prompt of the command line."""
        settings = run.generate or Generation()
        if self.prompt is None:
            return settings
        return settings.model_copy(update={"prompts": [self.prompt]})

    def check_run(self, name: str, run: Run) -> None:
        """Check a run against its datasets, its model and its trainer.

        Raises:
            ConfigError: the first mistake.
        """
        for dataset in run.datasets:
            refuse_unknown("dataset", dataset, self.datasets, f"runs.{name}.datasets")
        refuse_unknown("model", run.model, self.models, f"runs.{name}.model")
        sizes = [each.name for each in run.resolutions]
        for key, words in (("datasets", run.datasets), ("resolutions", sizes)):
            if twice := [word for word in words if words.count(word) > 1]:
                what = f"`{twice[0]}` is named twice"
                raise ConfigError(what, where=f"runs.{name}.{key}", hint="name it once")
        model = self.models[run.model]
        programs = {"musubi": self.musubi_tuner, "sdscripts": self.sd_scripts}
        own = {dataset: self.datasets[dataset] for dataset in run.datasets}
        program = programs.get(model.layout)
        for where, what, hint in faults_of_run(name, run, model, own, program):
            raise ConfigError(what, where=where, hint=hint)


def parse(values: Mapping[str, object]) -> Config:
    """Check the values of a configuration file as read.

    Raises:
        ConfigError: one line for each thing that is wrong, with key, value and hint.
    """
    try:
        return Config.model_validate(dict(values))
    except ConfigError:
        raise
    except ValidationError as error:
        from latentmake.config.mistakes import line_of

        mistakes = error.errors(include_url=False)
        others, mistakes = len(mistakes) - _MISTAKES, mistakes[:_MISTAKES]
        lines = [line_of(each, Config, values) for each in mistakes]
        if any(each["type"] == "extra_forbidden" for each in mistakes):
            # A misspelt key is missing under its right name: the first line says it all.
            lines = [
                line
                for line, each in zip(lines, mistakes, strict=True)
                if each["type"] != "missing" or f"`{each['loc'][-1]}`" not in " ".join(lines)
            ]
        lines += [f"and {others} more"] if others > 0 else []
        raise ConfigError(" | ".join(dict.fromkeys(lines))) from None
