"""Checks of a run that span several sections: datasets, model, trainer, external programs.

Where a trainer would stop with an assertion, or round in silence, the configuration is refused.
Sources: sd-scripts' `adjust_min_max_bucket_reso_by_steps` (library/train_util.py) and the calls of
`verify_bucket_reso_steps` in its training scripts; musubi-tuner's `BucketSelector`
(dataset/bucket.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from latentmake.config.datasets import Dataset
from latentmake.config.fields import Resolution
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.runs import Run
from latentmake.config.shapes import MACHINE, declared
from latentmake.config.trainers import MusubiTrainer, SdScriptsTrainer, Trainer
from latentmake.config.trainers.sdscripts import scripts_of
from latentmake.errors import ConfigError

__all__ = ["check_run", "check_sides", "check_steps", "refuse_ineffective"]

_WAN_LEAST = 32 * 32  # pixels: below, its smallest bucket would have no width
_KINDS = {"plain": "sd", "musubi": "musubi", "sdscripts": "sdscripts"}  # of trainers, by layout


def check_run(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    """Check a run against its datasets, its model, its trainer and the program that it needs.

    Args:
        name: of the run.
        run: its section.
        model: the model's section.
        datasets: sections of all datasets.
        program: the external program that trains the model's layout, where it is configured.

    Raises:
        ConfigError: the first mistake.
    """
    if run.trainer is not None:
        _check_trainer(name, run, run.trainer, model)
    own = {dataset: datasets[dataset] for dataset in run.datasets}
    if model.layout == "sdscripts":
        _check_sdscripts(name, run, model, own, program)
    if model.layout == "musubi":
        _check_musubi(name, run, model, own, program)
        return
    for dataset, settings in own.items():
        if settings.video:
            raise ConfigError(
                f"the dataset {dataset} holds videos, which {run.model} cannot encode",
                where=f"runs.{name}.datasets",
                mend=f"set the `task` of models.{run.model} if it is a Wan model",
            )
    for dataset, settings in own.items():
        if settings.control_directory:
            raise ConfigError(
                f"the dataset {dataset} has control images, which only Wan models use",
                where=f"runs.{name}.datasets",
                mend="leave out its `control_directory`",
            )


def check_sides(sizes: Iterable[Resolution], step: int, where: str, reason: str) -> None:
    """Refuse resolutions whose sides are no multiples of a number of pixels.

    Args:
        sizes: the resolutions.
        step: the number.
        where: their key.
        reason: why, after `are not a multiple of`.

    Raises:
        ConfigError: the first mistake.
    """
    for size in sizes:
        for side in (size.width, size.height):
            if side % step:
                below = side // step * step
                near = [str(each) for each in (below, below + step) if each > 0]
                raise ConfigError(
                    f"{side} pixels are not a multiple of {reason}",
                    where=where,
                    mend=f"use {' or '.join(near)}",
                )


def check_steps(sizes: Iterable[Resolution], steps: int, dataset: str) -> None:
    """Refuse bucket steps that are larger than a resolution.

    Raises:
        ConfigError: the first mistake.
    """
    for size in sizes:
        if size.width * size.height < steps**2:
            raise ConfigError(
                f"{steps} is more than the resolution {size.name} has",
                where=f"datasets.{dataset}.bucket_reso_steps",
                mend="use smaller steps or a larger resolution",
            )


def refuse_ineffective(name: str, dataset: Dataset, models: Mapping[str, Model]) -> None:
    """Refuse a key of a dataset that has no effect on the caches of any of its models.

    Args:
        name: of the dataset.
        dataset: its section.
        models: models of its runs, by name.

    Raises:
        ConfigError: the first such key.
    """
    layouts = {model.layout for model in models.values()}
    for key in Dataset.model_fields if layouts else ():
        effective = declared(Dataset, key, MACHINE).layouts
        if effective and not layouts & {*effective} and dataset.first_set(key):
            raise ConfigError(
                f"only caches of the layout {' or '.join(effective)} depend on this, and "
                f"{', '.join(sorted(models))} has others",
                where=f"datasets.{name}.{key}",
                mend="leave it out",
            )


def _check_trainer(name: str, run: Run, trainer: Trainer, model: Model) -> None:
    if trainer.layout != model.layout:
        raise ConfigError(
            f"this trainer reads caches of the layout {trainer.layout}, and {run.model} has "
            f"{model.layout}",
            where=f"runs.{name}.trainer.kind",
            mend=f"use kind: {_KINDS[model.layout]}, or set `layout` or `task` of "
            f"models.{run.model}",
        )
    if getattr(model, trainer.network) is None:
        raise ConfigError(
            f"the model {run.model} has no `{trainer.network}` to train",
            where=f"runs.{name}.model",
            mend=f"add `{trainer.network}` to models.{run.model}, or leave out the run's `trainer`",
        )


def _refuse_remote(name: str, datasets: Mapping[str, Dataset], program: str) -> None:
    for dataset, settings in datasets.items():
        if settings.remote:
            raise ConfigError(
                f"the dataset {dataset} lies on S3; {program} reads folders on disk alone",
                where=f"runs.{name}.datasets",
                mend="copy it to a folder, or mount the bucket",
            )


def _demand(name: str, program: ExternalProgram | None, key: str, title: str) -> None:
    if program is None:
        raise ConfigError(
            "this key is missing",
            where=key,
            mend=f"the run {name} needs {title}: set {key}.path to its folder",
        )


def _check_musubi(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    if run.trainer is not None or model.scripted:
        _demand(name, program, "musubi_tuner", "musubi-tuner")
    boundary = isinstance(run.trainer, MusubiTrainer) and run.trainer.timestep_boundary
    if boundary and not model.has_two_networks:
        raise ConfigError(
            f"{model.task} has one network, and no boundary between two",
            where=f"runs.{name}.trainer.timestep_boundary",
            mend="leave it out",
        )
    step = model.spec.side
    where = f"runs.{name}.resolutions"
    check_sides(run.resolutions, step, where, f"{step}: musubi-tuner would round them")
    _refuse_remote(name, datasets, "musubi-tuner")
    small = [size for size in run.resolutions if size.width * size.height < _WAN_LEAST]
    for dataset, settings in datasets.items():
        captions = settings.captions
        if captions and captions.first_set("variants", "caption_dropout_every_n_epochs"):
            raise ConfigError(
                "musubi-tuner reads one text of an item",
                where=f"datasets.{dataset}.captions",
                mend="leave out `variants` and `caption_dropout_every_n_epochs`",
            )
        if settings.fit == "bucket" and small:
            raise ConfigError(
                f"{small[0].name} is too small for musubi-tuner's buckets",
                where=where,
                mend="use 32 or more",
            )
        if settings.bucket_steps != step:
            raise ConfigError(
                f"musubi-tuner's buckets go in steps of {step}",
                where=f"datasets.{dataset}.bucket_reso_steps",
                mend="leave it out",
            )
        if str(model.task).endswith("-FC") and settings.control_directory is None:
            raise ConfigError(
                f"{model.task} needs control images",
                where=f"datasets.{dataset}.control_directory",
                mend="name their folder",
            )


def _check_sdscripts(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    side = model.spec.side
    reason = f"{side}, as {model.architecture} needs"
    check_sides(run.resolutions, side, f"runs.{name}.resolutions", reason)
    _refuse_remote(name, datasets, "sd-scripts")
    for dataset, settings in datasets.items():
        keys = ("caption_dropout_every_n_epochs", "token_warmup_step")
        if settings.captions and (key := settings.captions.first_set(*keys)):
            raise ConfigError(
                "sd-scripts cannot choose among the texts of an item by step or epoch",
                where=f"datasets.{dataset}.captions.{key}",
                mend="leave it out",
            )
        if settings.fit == "bucket":
            for error in _bucket_mistakes(f"datasets.{dataset}", settings, run, model):
                raise error
            check_steps(run.resolutions, settings.bucketing(model.spec).bucket_reso_steps, dataset)
    if not isinstance(run.trainer, SdScriptsTrainer):
        return
    assert model.architecture is not None
    known = scripts_of(model.architecture)
    if run.trainer.script not in (None, *known):
        raise ConfigError(
            f"{run.trainer.script} does not train {model.architecture}",
            where=f"runs.{name}.trainer.script",
            mend=f"use {' or '.join(known)}",
        )
    if model.spec.caches_text and (flag := run.trainer.forbidden()):
        raise ConfigError(
            f"{flag} does not go with cached text",
            where=f"runs.{name}.trainer.arguments",
            mend="leave it out, and see the dataset's `captions`",
        )
    _demand(name, program, "sd_scripts", "sd-scripts")


def _bucket_mistakes(where: str, dataset: Dataset, run: Run, model: Model) -> Iterator[ConfigError]:
    found, divisor = dataset.bucketing(model.spec), model.spec.bucket_divisor
    if found.bucket_reso_steps % divisor:
        yield ConfigError(
            f"{found.bucket_reso_steps} is not a multiple of {divisor}, as sd-scripts asks for "
            f"{model.architecture}",
            where=f"{where}.bucket_reso_steps",
            mend=f"use a multiple of {divisor}",
        )
    if not found.min_bucket_reso:
        yield ConfigError(
            f"{dataset.min_bucket_reso} is smaller than a step of {found.bucket_reso_steps}",
            where=f"{where}.min_bucket_reso",
            mend=f"use {found.bucket_reso_steps} or more",
        )
    for size in run.resolutions:
        shorter, longer = sorted((size.width, size.height))
        if shorter < found.min_bucket_reso:
            yield ConfigError(
                f"{found.min_bucket_reso} is more than the resolution {size.name} has, which "
                "sd-scripts refuses",
                where=f"{where}.min_bucket_reso",
                mend=f"set it to {shorter} or less",
            )
        if longer > found.max_bucket_reso:
            yield ConfigError(
                f"{found.max_bucket_reso} is less than the resolution {size.name} has, which "
                "sd-scripts refuses",
                where=f"{where}.max_bucket_reso",
                mend=f"set it to {longer} or more",
            )
