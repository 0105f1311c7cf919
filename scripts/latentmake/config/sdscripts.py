"""What sd-scripts asks of datasets and runs: steps of buckets, smallest and largest sides.

Where it would stop with an assertion, or round in silence, the configuration is refused instead.
Source: sd-scripts, library/train_util.py, `adjust_min_max_bucket_reso_by_steps`, and the calls of
`verify_bucket_reso_steps` in its training scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from latentmake.config.architectures import ARCHITECTURES, ArchitectureName
from latentmake.config.datasets import Dataset
from latentmake.config.machines import SdScripts
from latentmake.config.models import Model
from latentmake.config.sdscripts_trainer import SdScriptsTrainer, scripts_of
from latentmake.errors import ConfigError

if TYPE_CHECKING:
    from latentmake.config.whole import Run

__all__ = ["Bucketing", "bucketing", "check_datasets", "check_trainer"]

_LEAST, _MOST = 256, 1024


class Bucketing(NamedTuple):
    """What a dataset's buckets are made by.

    Attributes:
        bucket_reso_steps: sides of buckets are multiples of this, in pixels.
        bucket_no_upscale: whether a small image keeps its size.
        min_bucket_reso: no side of a bucket is smaller, in pixels; a multiple of the steps.
        max_bucket_reso: none is larger; likewise.
    """

    bucket_reso_steps: int
    bucket_no_upscale: bool
    min_bucket_reso: int
    max_bucket_reso: int


def bucketing(dataset: Dataset, architecture: ArchitectureName) -> Bucketing:
    """Return what a dataset's buckets are made by, with the defaults of an architecture."""
    steps = dataset.bucket_reso_steps or ARCHITECTURES[architecture].bucket_steps
    least = dataset.min_bucket_reso or _LEAST
    most = dataset.max_bucket_reso or _MOST
    return Bucketing(steps, dataset.bucket_no_upscale, least - least % steps, most + -most % steps)


def check_datasets(name: str, run: Run, model: Model, datasets: Mapping[str, Dataset]) -> None:
    """Refuse what sd-scripts would refuse, or cut otherwise than asked for.

    Args:
        name: of the run.
        run: its section of the configuration.
        model: its model, of the layout `sdscripts`.
        datasets: all of them.

    Raises:
        ConfigError: the first mistake.
    """
    side = model.spec.side
    for size in run.resolutions:
        for pixels in (size.width, size.height):
            if pixels % side:
                below = pixels // side * side
                near = [str(each) for each in (below, below + side) if each > 0]
                raise ConfigError(
                    f"{pixels} pixels are not a multiple of {side}, as {model.architecture} needs",
                    where=f"runs.{name}.resolutions",
                    mend=f"use {' or '.join(near)}",
                )
    for dataset in run.datasets:
        if datasets[dataset].remote:
            raise ConfigError(
                f"the dataset {dataset} lies on S3; sd-scripts reads folders on disk alone",
                where=f"runs.{name}.datasets",
                mend="copy it to a folder, or mount the bucket",
            )
        making = datasets[dataset].captions
        keys = ("caption_dropout_every_n_epochs", "token_warmup_step")
        if making and (key := making.first_set(*keys)):
            raise ConfigError(
                "sd-scripts cannot choose among the texts of an item by step or epoch",
                where=f"datasets.{dataset}.captions.{key}",
                mend="leave it out",
            )
        for error in _mistakes(dataset, datasets[dataset], run, model):
            raise error


def _mistakes(name: str, dataset: Dataset, run: Run, model: Model) -> Iterator[ConfigError]:
    if dataset.fit != "bucket":
        return
    assert model.architecture is not None
    found, divisor = bucketing(dataset, model.architecture), model.spec.bucket_divisor
    where = f"datasets.{name}"
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
        if size.width * size.height < found.bucket_reso_steps**2:
            yield ConfigError(
                f"{found.bucket_reso_steps} is more than the resolution {size.name} has",
                where=f"{where}.bucket_reso_steps",
                mend="use smaller steps or a larger resolution",
            )


def check_trainer(name: str, run: Run, model: Model, place: SdScripts | None) -> None:
    """Refuse a training that sd-scripts could not begin.

    Args:
        name: of the run.
        run: its section of the configuration.
        model: its model, of the layout `sdscripts`.
        place: where sd-scripts lies.

    Raises:
        ConfigError: the first mistake.
    """
    trainer = run.trainer
    if not isinstance(trainer, SdScriptsTrainer):
        return
    assert model.architecture is not None
    known = scripts_of(model.architecture)
    if trainer.script not in (None, *known):
        raise ConfigError(
            f"{trainer.script} does not train {model.architecture}",
            where=f"runs.{name}.trainer.script",
            mend=f"use {' or '.join(known)}",
        )
    if model.spec.caches_text and (flag := trainer.forbidden()):
        raise ConfigError(
            f"{flag} does not go with cached text",
            where=f"runs.{name}.trainer.arguments",
            mend="leave it out, and see the dataset's `captions`",
        )
    if model.checkpoint is None:
        raise ConfigError(
            f"the model {run.model} has no `checkpoint` to train",
            where=f"runs.{name}.model",
            mend=f"add `checkpoint` to models.{run.model}, or leave out the run's `trainer`",
        )
    if place is None:
        raise ConfigError(
            "this key is missing",
            where="sd_scripts",
            mend=f"the run {name} needs sd-scripts: set sd_scripts.path to its folder",
        )
