"""Checks of a dataset against what an architecture of musubi-tuner takes.

Images or videos, control images, layers, and the keys of FramePack's training on one frame.
"""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import ConfigError


def control_counts(model: Model, settings: Dataset) -> tuple[int, int | None]:
    """Return the fewest and most control images of an item; None for any number.

    Where a model is trained on one frame they are as many as `fp_1f_clean_indices`, by default one.
    Source: musubi-tuner, `ImageDataset.__init__` (dataset/image_video_dataset.py).
    """
    if model.version.one_frame:
        count = len(settings.fp_1f_clean_indices or [0])
        return count, count
    return model.version.controls


def check_row(run: str, dataset: str, settings: Dataset, name: str, model: Model) -> None:
    """Check a dataset of a run against the row of its model.

    Args:
        run: name of the run.
        dataset: name of the dataset.
        settings: its section.
        name: of the model.
        model: its section.

    Raises:
        ConfigError: the first mistake.
    """
    version, where = model.version, f"datasets.{dataset}"
    title = f"{model.title} ({model.task})" if model.task else model.title
    holds = "videos" if settings.video else "images"
    if not (version.videos if settings.video else version.images):
        others = "images" if settings.video else "videos"
        hint = "leave out its `target_frames`" if settings.video else "give it `target_frames`"
        raise ConfigError(
            f"the dataset {dataset} holds {holds}, and {title} takes {others} alone",
            where=f"runs.{run}.datasets",
            hint=f"{hint}, or use another model than {name}",
        )
    least, most = control_counts(model, settings)
    if most == 0 and settings.control_directory is not None:
        what = f"{title} takes no control images"
        raise ConfigError(what, where=f"{where}.control_directory", hint="leave it out")
    listed = settings.is_list and not model.spec.encodes  # by columns of the list
    if least and settings.control_directory is None and not listed:
        what = f"{title} needs control images"
        raise ConfigError(what, where=f"{where}.control_directory", hint="name their folder")
    for keys, counts, what in _rules(model):
        if not counts and (key := settings.first_set(*keys)):
            what = f"{title} {what}"
            raise ConfigError(what, where=f"{where}.{key}", hint="leave it out")
    if model.spec.scripts is not None and model.spec.scripts.layers != settings.multiple_target:
        what = f"{title} needs the layers of each image"
        raise ConfigError(what, where=f"{where}.multiple_target", hint="set it to true")
    _check_sections(settings, model, title, where)
    if version.one_frame and settings.fp_1f_target_index is None:
        what = f"{title} needs the index of the frame that is trained"
        raise ConfigError(what, where=f"{where}.fp_1f_target_index", hint="set it, usually to 9")


def _check_sections(settings: Dataset, model: Model, title: str, where: str) -> None:
    """Refuse lengths of clips below that of a section, of which the script of latents would die."""
    scripts, window = model.spec.scripts, settings.fp_latent_window_size
    assert scripts is not None
    if not scripts.sections or not settings.video or settings.frame_extraction == "full":
        return
    least = scripts.frames * window + 1
    short = [frames for frames in settings.target_frames or () if frames < least]
    if short:
        what = f"{short[0]} frames are too few for a section of {title}, which has {window} latents"
        raise ConfigError(what, where=f"{where}.target_frames", hint=f"use {least} or more")


def _rules(model: Model) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield keys of a dataset, whether they have an effect, and the reason where they have not."""
    scripts = model.spec.scripts
    assert scripts is not None
    own_sizes = ("no_resize_control", "control_resolution")
    yield own_sizes, scripts.sized_controls, "takes control images of the item's own size alone"
    yield ("multiple_target",), scripts.layers, "has one target image"
    yield ("fp_latent_window_size",), scripts.sections, "has no sections"
    one_frame = ("fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post")
    yield one_frame, model.version.one_frame, "is not trained on one frame"
