"""Checks of a run that span several sections: datasets, model, trainer, external programs.

Where a trainer would stop with an assertion, or round in silence, the configuration is refused.
Sources: sd-scripts' `adjust_min_max_bucket_reso_by_steps` (library/train_util.py) and the calls of
`verify_bucket_reso_steps` in its training scripts; musubi-tuner's `BucketSelector`
(dataset/bucket.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from latentmake.config.datasets import Dataset
from latentmake.config.fields import Resolution
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.row_checks import check_row
from latentmake.config.runs import Run
from latentmake.config.script_checks import check_training
from latentmake.config.shapes import MACHINE, declared
from latentmake.config.trainers import MusubiTrainer, SdScriptsTrainer, WanTrainer
from latentmake.config.wan_checks import check_wan
from latentmake.errors import ConfigError

_KINDS = {"plain": "sd", "musubi": "wan", "sdscripts": "sdscripts"}  # of trainers, by layout


def check_run(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    """Check a run against its datasets, model and trainer, and the program for its model's layout.

    Raises:
        ConfigError: the first mistake.
    """
    _check_trainer(name, run, model)
    _check_validation(name, run)
    if model.layout == "sdscripts":
        _check_sdscripts(name, run, model, datasets, program)
    if model.layout == "musubi":
        if isinstance(run.trainer, WanTrainer):
            check_wan(name, run.trainer, model)
        _check_musubi(name, run, model, datasets, program)
        return
    where = f"runs.{name}.datasets"
    for dataset, settings in datasets.items():
        if settings.video:
            what = f"the dataset {dataset} holds videos, which {run.model} cannot encode"
            hint = f"set the `task` or `architecture` of models.{run.model} if it can"
            raise ConfigError(what, where=where, hint=hint)
        if settings.control_directory:
            what = f"the dataset {dataset} has control images, which only musubi-tuner's models use"
            raise ConfigError(what, where=where, hint="leave out its `control_directory`")


def check_sides(sizes: Iterable[Resolution], step: int, where: str, reason: str) -> None:
    """Refuse resolutions whose sides are not multiples of `step` pixels.

    `reason` ends the message: `... pixels are not a multiple of {reason}`.

    Raises:
        ConfigError: the first mistake.
    """
    for side in (side for size in sizes for side in (size.width, size.height)):
        if side % step:
            below = side // step * step
            near = " or ".join(str(each) for each in (below, below + step) if each > 0)
            what = f"{side} pixels are not a multiple of {reason}"
            raise ConfigError(what, where=where, hint=f"use {near}")


def check_steps(sizes: Iterable[Resolution], steps: int, dataset: str) -> None:
    """Refuse bucket steps that are larger than a resolution.

    Raises:
        ConfigError: the first mistake.
    """
    where = f"datasets.{dataset}.bucket_reso_steps"
    for size in sizes:
        if size.width * size.height < steps**2:
            what = f"{steps} is more than the resolution {size.name} has"
            raise ConfigError(what, where=where, hint="use smaller steps or a larger resolution")


def refuse_ineffective(name: str, dataset: Dataset, models: Mapping[str, Model]) -> None:
    """Refuse a key of a dataset that has no effect on the caches of any of its models.

    Raises:
        ConfigError: the first such key.
    """
    layouts = {model.layout for model in models.values()}
    for key in Dataset.model_fields if layouts else ():
        effective = declared(Dataset, key, MACHINE).layouts
        if effective and not layouts & {*effective} and dataset.first_set(key):
            what = f"only caches of the layout {' or '.join(effective)} depend on this, and "
            what += f"{', '.join(sorted(models))} has others"
            raise ConfigError(what, where=f"datasets.{name}.{key}", hint="leave it out")


def _check_trainer(name: str, run: Run, model: Model) -> None:
    trainer = run.trainer
    if trainer is None:
        return
    if trainer.layout != model.layout:
        what = f"this trainer reads caches of the layout {trainer.layout}, and {run.model} has "
        what += model.layout
        kind = _KINDS[model.layout]
        if model.spec.scripts is not None and not model.spec.encodes:
            kind = "musubi"
        hint = f"use kind: {kind}, or set `layout` or `task` of models.{run.model}"
        raise ConfigError(what, where=f"runs.{name}.trainer.kind", hint=hint)
    key = trainer.network
    if all(getattr(model, each) is None for each in (key, *trainer.alternatives)):
        what = f"the model {run.model} has no `{key}` to train"
        hint = f"add `{key}` to models.{run.model}, or leave out the run's `trainer`"
        raise ConfigError(what, where=f"runs.{name}.model", hint=hint)


def _check_validation(name: str, run: Run) -> None:
    if run.validation is None or (run.trainer is not None and run.trainer.evaluates):
        return
    what = "the run has no trainer that could leave items out"
    if run.trainer is not None:
        what = f"the trainer {run.trainer.kind} evaluates no items that are held out; only wan does"
    hint = "leave it out, or hold images or videos out by a dataset of their own"
    raise ConfigError(what, where=f"runs.{name}.validation", hint=hint)


def _refuse_remote(name: str, datasets: Mapping[str, Dataset], program: str) -> None:
    for dataset, settings in datasets.items():
        if settings.remote:
            what = f"the dataset {dataset} lies on S3; {program} reads folders on disk alone"
            hint = "copy it to a folder, or mount the bucket"
            raise ConfigError(what, where=f"runs.{name}.datasets", hint=hint)


def _refuse_choosing(dataset: str, settings: Dataset, program: str) -> None:
    keys = ("caption_dropout_every_n_epochs", "token_warmup_step")
    if settings.captions and (key := settings.captions.first_set(*keys)):
        what = f"{program} cannot choose among the texts of an item by step or epoch"
        where = f"datasets.{dataset}.captions.{key}"
        raise ConfigError(what, where=where, hint="leave it out")


def _require(name: str, program: ExternalProgram | None, key: str, title: str) -> None:
    if program is None:
        hint = f"the run {name} needs {title}: set {key}.path to its folder"
        raise ConfigError("this key is missing", where=key, hint=hint)


def _check_musubi(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    trainer = run.trainer
    ours = isinstance(trainer, WanTrainer) and not model.scripted
    reader = "this trainer" if isinstance(trainer, WanTrainer) else "musubi-tuner"
    if isinstance(trainer, MusubiTrainer) or model.scripted:
        _require(name, program, "musubi_tuner", "musubi-tuner")
    if isinstance(trainer, MusubiTrainer):
        check_training(name, trainer, model)
    step, sizes = model.spec.side, f"runs.{name}.resolutions"
    check_sides(
        run.resolutions,
        step,
        sizes,
        f"{step}, as Wan needs" if ours else f"{step}: musubi-tuner would round them",
    )
    _refuse_remote(name, datasets, reader)
    buckets = "Wan's" if ours else "musubi-tuner's"
    least = 2 * step  # pixels: below, the smallest bucket would have no width
    small = [size for size in run.resolutions if size.width * size.height < least**2]
    for dataset, settings in datasets.items():
        where = f"datasets.{dataset}"
        if not isinstance(trainer, WanTrainer):
            _refuse_choosing(dataset, settings, "musubi-tuner")
        if settings.fit == "bucket" and small:
            what = f"{small[0].name} is too small for {buckets} buckets"
            raise ConfigError(what, where=sizes, hint=f"use {least} or more")
        keys = [key for key in settings.own_clips if key != "path"]  # a list is given to them
        if model.scripted and keys:
            what = "musubi-tuner's own scripts read videos cut to buckets, as stored"
            hint = "leave it out"
            if model.spec.encodes:
                hint += f", or leave out `encoder` of models.{run.model}"
            raise ConfigError(what, where=f"{where}.{keys[0]}", hint=hint)
        if settings.bucket_reso_steps not in (None, step):
            what = f"{buckets} buckets go in steps of {step}"
            raise ConfigError(what, where=f"{where}.bucket_reso_steps", hint="leave it out")
        check_row(name, dataset, settings, run.model, model)


def _check_sdscripts(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    strategies = model.spec.strategies
    if strategies is None:
        what = f"sd-scripts does not train {model.title}"
        raise ConfigError(what, where=f"models.{run.model}.layout", hint="leave it out")
    side, trainer = model.spec.side, run.trainer
    reason = f"{side}, as {model.architecture} needs"
    check_sides(run.resolutions, side, f"runs.{name}.resolutions", reason)
    _refuse_remote(name, datasets, "sd-scripts")
    for dataset, settings in datasets.items():
        _refuse_choosing(dataset, settings, "sd-scripts")
        if settings.is_list:
            what = "sd-scripts reads folders of images, and this is a list"
            hint = "name the folder, and the list as its `metadata_file`"
            raise ConfigError(what, where=f"datasets.{dataset}.path", hint=hint)
        if settings.fit == "bucket":
            _check_buckets(dataset, settings, run, model)
    if not model.spec.encodes:
        _require(name, program, "sd_scripts", "sd-scripts")
    if not isinstance(trainer, SdScriptsTrainer):
        return
    known = strategies.scripts
    if trainer.script not in (None, *known):
        what, where = f"{trainer.script} does not train {model.architecture}", "trainer.script"
        raise ConfigError(what, where=f"runs.{name}.{where}", hint=f"use {' or '.join(known)}")
    if model.spec.caches_text and (flag := trainer.forbidden()):
        what, where = f"{flag} does not go with cached text", f"runs.{name}.trainer.arguments"
        raise ConfigError(what, where=where, hint="leave it out, and see the dataset's `captions`")
    _require(name, program, "sd_scripts", "sd-scripts")


def _check_buckets(name: str, dataset: Dataset, run: Run, model: Model) -> None:
    where, divisor = f"datasets.{name}", model.spec.bucket_divisor
    if run.trainer is not None and model.spec.strategies is not None:
        divisor = model.spec.strategies.divisor or divisor
    steps, _, least, most = dataset.bucketing(model.spec)
    if steps % divisor:
        what = (
            f"{steps} is not a multiple of {divisor}, as sd-scripts asks for {model.architecture}"
        )
        hint = f"use a multiple of {divisor}"
        raise ConfigError(what, where=f"{where}.bucket_reso_steps", hint=hint)
    if not least:
        what = f"{dataset.min_bucket_reso} is smaller than a step of {steps}"
        raise ConfigError(what, where=f"{where}.min_bucket_reso", hint=f"use {steps} or more")
    for size in run.resolutions:
        shorter, longer = sorted((size.width, size.height))
        refused = f"than the resolution {size.name} has, which sd-scripts refuses"
        if shorter < least:
            what, hint = f"{least} is more {refused}", f"set it to {shorter} or less"
            raise ConfigError(what, where=f"{where}.min_bucket_reso", hint=hint)
        if longer > most:
            what, hint = f"{most} is less {refused}", f"set it to {longer} or more"
            raise ConfigError(what, where=f"{where}.max_bucket_reso", hint=hint)
    check_steps(run.resolutions, steps, name)
