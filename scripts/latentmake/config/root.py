"""The root of `config.yaml`, its validation, and its JSON schema.

Docstrings of keys are Markdown, as the reference shows it; the schema has them without links. They
are read from the source here, since reading them in each process would take it 40 ms.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from latentmake.config.checks import check_layouts, check_run
from latentmake.config.datasets import Dataset
from latentmake.config.fields import CLIPS, Closed, Name
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
from latentmake.config.trainers import Generation, Prompt, prompt_of_command
from latentmake.errors import ConfigError, refuse_unknown

_MISTAKES = 50  # that are named at a time


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
    prompt: Annotated[Prompt | None, BeforeValidator(prompt_of_command)] = Field(
        None, json_schema_extra=CLIPS
    )
    """A prompt for `generate_{run}`, meant for the command line: `snakemake generate_cats --config
    prompt="a boat on a lake"` draws clips of this prompt instead of those of
    [`generate`](generate.md). Clips of other prompts stay in the folder and on its page, if their
    weights and settings are still the same."""

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, run in self.runs.items():
            self.check_run(name, run)
        for name, dataset in self.datasets.items():
            models = {
                run.model: self.models[run.model]
                for run in self.runs.values()
                if name in run.datasets
            }
            check_layouts(name, dataset, models)
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
        check_run(name, run, model, own, programs.get(model.layout))


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


_LIMITS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"
}  # fmt: skip
"""Limits as pydantic leaves them behind a validator -> as JSON schema names them."""


def json_schema() -> str:
    """Return the JSON schema of the configuration, as `config/schema.json` holds it."""
    from latentmake.config.mistakes import sections

    schema = Config.model_json_schema()
    for model in {section.model for section in sections(Config)}:
        section = schema if model is Config else schema["$defs"][model.__name__]
        section["description"] = _plain(inspect.cleandoc(model.__doc__ or "").partition("\n")[0])
        for key, text in descriptions(model).items():
            described = {**section["properties"][key], "description": _plain(text)}
            section["properties"][key] = dict(sorted(described.items()))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "latentmake configuration"
    text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return re.sub(r'"(ge|gt|le|lt)": ', lambda limit: f'"{_LIMITS[limit[1]]}": ', text)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the keys of a section, inherited ones first, with the strings that follow them."""
    return dict(_docstrings(model))


def _plain(text: str) -> str:
    """Return Markdown without links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def _docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for part in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for node, following in pairwise(tree.body):
            match node, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if key in model.model_fields:
                    yield key, " ".join(text.split())
