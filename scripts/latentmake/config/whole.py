"""The whole of `config.yaml`, and what is wrong with one, each mistake in a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from latentmake.config.cluster import Batch, Cluster
from latentmake.config.datasets import Dataset
from latentmake.config.fields import PATTERNS, Closed, Name, ResolutionField, listed
from latentmake.config.folders import FolderField
from latentmake.config.machines import (
    Export,
    MusubiTuner,
    Publish,
    SdScripts,
    Storage,
    Store,
)
from latentmake.config.models import Model
from latentmake.config.sdscripts import check_datasets, check_trainer
from latentmake.config.sdscripts_trainer import SdScriptsTrainer
from latentmake.config.shapes import MACHINE, MANIFEST, Shapes, declared
from latentmake.config.trainers import MusubiTrainer, SdTrainer
from latentmake.config.unknown_keys import hint, nearest, shown
from latentmake.errors import ConfigError

WAN_STEP = 16
"""Sides of all that Wan models see are multiples of this, in pixels."""

__all__ = ["WAN_STEP", "Config", "Run", "json_schema", "nearest", "parse"]


_WAN_LEAST = 32 * 32  # pixels: below, its smallest bucket would have no width


class Run(Closed):
    """Datasets x resolutions x model x trainer settings; its target is `train_{run}`."""

    datasets: Annotated[
        list[str],
        BeforeValidator(listed, json_schema_input_type=str | list[str]),
        Field(min_length=1, json_schema_extra=MANIFEST, description="What to train on."),
    ]
    model: str = Field(
        json_schema_extra=Shapes("latents", "text", "weights"),
        description="Which encoders, and what is trained.",
    )
    resolutions: Annotated[
        list[ResolutionField],
        BeforeValidator(listed, json_schema_input_type=ResolutionField | list[ResolutionField]),
        Field(
            min_length=1,
            json_schema_extra=Shapes("latents", "manifest"),
            description="A side in pixels, or [width, height], each.",
        ),
    ]
    trainer: (
        Annotated[SdTrainer | MusubiTrainer | SdScriptsTrainer, Field(discriminator="kind")] | None
    ) = Field(None, description="Who trains, and how; without it the run is its caches alone.")


class Config(Closed):
    """The whole of `config.yaml`."""

    datasets: dict[Name, Dataset] = Field(min_length=1, description="Folders of captioned images.")
    models: dict[Name, Model] = Field(min_length=1, description="Encoders and what is trained.")
    runs: dict[Name, Run] = Field(min_length=1, description="What to train, on what.")
    batch: Batch = Field(Batch(), description="How the work is cut into jobs.")
    cluster: Cluster = Field(Cluster(), description="What jobs ask of a cluster.")
    musubi_tuner: MusubiTuner | None = Field(
        None, description="Where musubi-tuner lies, which trains Wan models."
    )
    sd_scripts: SdScripts | None = Field(
        None, description="Where sd-scripts lies, which trains models of `layout: sdscripts`."
    )
    publish: Publish = Field(Publish(), description="What publish_{run} puts where.")
    export: Export = Field(Export(), description="Where export_{run} writes caches.")
    store: Store = Field(Store(), description="How much of what builds replace and remove is kept.")
    storage: Storage | None = Field(None, description="Where store_{run} puts finished caches.")
    folders: dict[Name, FolderField] = Field(
        {}, description="Folders of images that compare_... shows beside runs."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for name in self.folders:
            if name in self.runs:
                raise ConfigError(
                    f"the folder {name} bears the name of a run, so that `compare_{name}` could "
                    "be either",
                    where=f"folders.{name}",
                    mend="give it another name",
                )
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, run in self.runs.items():
            self.check_run(name, run)
        for name, dataset in self.datasets.items():
            self._refuse_unheeded(name, dataset)
        return self

    def check_run(self, name: str, run: Run) -> None:
        """Check a run against its datasets, its model and its trainer.

        Raises:
            ConfigError: the first mistake.
        """
        for dataset in run.datasets:
            _known(f"runs.{name}.datasets", dataset, self.datasets, "dataset")
        _known(f"runs.{name}.model", run.model, self.models, "model")
        _no_doubles(f"runs.{name}.datasets", run.datasets)
        _no_doubles(f"runs.{name}.resolutions", [each.name for each in run.resolutions])
        model = self.models[run.model]
        _trainer_fits(name, run, model)
        if model.layout == "sdscripts":
            check_datasets(name, run, model, self.datasets)
            check_trainer(name, run, model, self.sd_scripts)
        if model.layout == "musubi":
            self._check_wan(name, run, model)
        elif video := [each for each in run.datasets if self.datasets[each].video]:
            raise ConfigError(
                f"the dataset {video[0]} holds videos, which {run.model} cannot encode",
                where=f"runs.{name}.datasets",
                mend=f"set the `task` of models.{run.model} if it is a Wan model",
            )
        elif control := [x for x in run.datasets if self.datasets[x].control_directory]:
            raise ConfigError(
                f"the dataset {control[0]} has control images, which only Wan models know",
                where=f"runs.{name}.datasets",
                mend="leave out its `control_directory`",
            )

    def _refuse_unheeded(self, name: str, dataset: Dataset) -> None:
        """Refuse a key of a dataset that the caches of none of its runs depend on."""
        models = {run.model for run in self.runs.values() if name in run.datasets}
        layouts = {self.models[model].layout for model in models}
        for key in Dataset.model_fields if layouts else ():
            heeding = declared(Dataset, key, MACHINE).layouts
            if heeding and not layouts & {*heeding} and dataset.first_set(key):
                raise ConfigError(
                    f"only caches of the layout {' or '.join(heeding)} depend on this, and "
                    f"{', '.join(sorted(models))} has others",
                    where=f"datasets.{name}.{key}",
                    mend="leave it out",
                )

    def _check_wan(self, name: str, run: Run, model: Model) -> None:
        if self.musubi_tuner is None and (run.trainer is not None or model.encoder == "musubi"):
            raise ConfigError(
                "this key is missing",
                where="musubi_tuner",
                mend=f"the run {name} needs musubi-tuner: set musubi_tuner.path to its folder",
            )
        boundary = isinstance(run.trainer, MusubiTrainer) and run.trainer.timestep_boundary
        if boundary and not model.has_two_networks:
            raise ConfigError(
                f"{model.task} has one network, and no boundary between two",
                where=f"runs.{name}.trainer.timestep_boundary",
                mend="leave it out",
            )
        for size in run.resolutions:
            for side in (size.width, size.height):
                if side % WAN_STEP:
                    below = side // WAN_STEP * WAN_STEP
                    near = [str(each) for each in (below, below + WAN_STEP) if each > 0]
                    raise ConfigError(
                        f"{side} pixels are not a multiple of {WAN_STEP}: musubi-tuner would "
                        "round them",
                        where=f"runs.{name}.resolutions",
                        mend=f"use {' or '.join(near)}",
                    )
        for dataset in run.datasets:
            settings = self.datasets[dataset]
            if settings.remote:
                raise ConfigError(
                    f"the dataset {dataset} lies on S3; musubi-tuner reads folders on disk alone",
                    where=f"runs.{name}.datasets",
                    mend="copy it to a folder, or mount the bucket",
                )
            if settings.text_variants > 1 or (
                settings.captions and settings.captions.caption_dropout_every_n_epochs
            ):
                raise ConfigError(
                    "musubi-tuner reads one text of an item",
                    where=f"datasets.{dataset}.captions",
                    mend="leave out `variants` and `caption_dropout_every_n_epochs`",
                )
            small = [size for size in run.resolutions if size.width * size.height < _WAN_LEAST]
            if settings.fit == "bucket" and small:
                raise ConfigError(
                    f"{small[0].name} is too small for musubi-tuner's buckets",
                    where=f"runs.{name}.resolutions",
                    mend="use 32 or more",
                )
            if settings.bucket_steps != WAN_STEP:
                raise ConfigError(
                    f"musubi-tuner's buckets go in steps of {WAN_STEP}",
                    where=f"datasets.{dataset}.bucket_reso_steps",
                    mend="leave it out",
                )
            if str(model.task).endswith("-FC") and settings.control_directory is None:
                raise ConfigError(
                    f"{model.task} needs control images",
                    where=f"datasets.{dataset}.control_directory",
                    mend="name their folder",
                )


def _trainer_fits(name: str, run: Run, model: Model) -> None:
    if run.trainer is None:
        return
    if isinstance(run.trainer, SdScriptsTrainer):
        if model.layout != "sdscripts":
            raise ConfigError(
                f"sd-scripts cannot read the caches of {run.model}",
                where=f"runs.{name}.model",
                mend=f"set layout: sdscripts and `architecture` of models.{run.model}",
            )
    elif isinstance(run.trainer, MusubiTrainer):
        if model.task is None:
            raise ConfigError(
                f"musubi-tuner trains Wan models, and {run.model} has no `task`",
                where=f"runs.{name}.model",
                mend=f"set the `task` of models.{run.model}, or train with kind: sd",
            )
        if model.dit is None:
            raise ConfigError(
                f"the model {run.model} has no `dit` to train",
                where=f"runs.{name}.model",
                mend=f"add `dit` to models.{run.model}, or leave out the run's `trainer`",
            )
    elif model.task is not None:
        raise ConfigError(
            f"the trainer sd cannot train {run.model}, a Wan model",
            where=f"runs.{name}.trainer.kind",
            mend="use kind: musubi",
        )
    elif model.layout == "sdscripts":
        raise ConfigError(
            f"the trainer sd reads our own caches, and those of {run.model} are sd-scripts'",
            where=f"runs.{name}.trainer.kind",
            mend=f"use kind: sdscripts, or leave out layout of models.{run.model}",
        )
    elif model.unet is None:
        raise ConfigError(
            f"the model {run.model} has no `unet` to train",
            where=f"runs.{name}.model",
            mend=f"add `unet` to models.{run.model}, or leave out the run's `trainer`",
        )


def _known(where: str, word: str, known: Mapping[str, object], kind: str) -> None:
    if word in known:
        return
    guess = nearest(word, known)
    raise ConfigError(
        f"there is no {kind} `{word}`",
        where=where,
        mend=f"did you mean `{guess}`?" if guess else f"known: {', '.join(known)}",
    )


def _no_doubles(where: str, words: list[str]) -> None:
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(f"`{word}` is named twice", where=where, mend="name it once")


def _line(error: ErrorDetails, values: Mapping[str, object]) -> str:
    location = error["loc"]
    where = shown(location)
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if error["type"] == "extra_forbidden":
        return str(ConfigError("unknown key", where=where, mend=hint(Config, location, values)))
    if error["type"] == "union_tag_not_found":
        return str(ConfigError("this key is missing", where=f"{where}.kind", mend="add it"))
    if error["type"] == "union_tag_invalid":
        context = error.get("ctx") or {}
        what = f"there is no trainer {json.dumps(context.get('tag'))}"
        known = f"known: {context.get('expected_tags')}".replace("'", "")
        return str(ConfigError(what, where=f"{where}.kind", mend=known))
    if error["type"] == "missing":
        return str(ConfigError("this key is missing", where=where, mend="add it"))
    value = error["input"]
    written = (
        ""
        if isinstance(value, dict | BaseModel)
        else f"{json.dumps(value, default=str, ensure_ascii=False)} "
    )
    what, mend = _rule(error)
    return str(ConfigError(f"{written}{what}", where=where.removesuffix(".[key]"), mend=mend))


def _rule(error: ErrorDetails) -> tuple[str, str]:
    """Return which rule a value breaks, and what to write."""
    context, kind = error.get("ctx") or {}, error["type"]
    if kind == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return "is not allowed here", f"use {PATTERNS[context['pattern']]}"
    what = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    for bound, word in (("ge", "or more"), ("le", "or less")):
        if bound in context:
            return what, f"use {context[bound]} {word}"
    if kind == "value_error" and ";" in what:
        return what, ""  # it says itself what to write
    return what, "see config/README.md"


def parse(values: Mapping[str, object]) -> Config:
    """Check the values of a configuration file.

    Args:
        values: the file as read: mappings, lists and plain values.

    Raises:
        ConfigError: one line for each thing that is wrong, with key, value and mend.
    """
    try:
        return Config.model_validate(dict(values))
    except ConfigError:
        raise
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        lines = [_line(each, values) for each in mistakes]
        if any(each["type"] == "extra_forbidden" for each in mistakes):
            # A misspelt key is missing under its right name: the first line says it all.
            lines = [
                line
                for line, each in zip(lines, mistakes, strict=True)
                if each["type"] != "missing" or f"`{each['loc'][-1]}`" not in " ".join(lines)
            ]
        raise ConfigError(" | ".join(dict.fromkeys(lines))) from None


def json_schema() -> str:
    """Return the JSON schema of the configuration, as `config/schema.json` holds it."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "latentmake configuration"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
