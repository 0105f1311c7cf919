"""Dataset TOML of musubi-tuner's scripts.

It refuses keys that it does not know, so none stand here but those that it documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tomli_w

from latentmake.config.datasets import Dataset
from latentmake.layouts.layout import layout_of
from latentmake.training.external.arguments import absolute
from latentmake.training.external.musubi.order import MusubiOrder

Directory = Callable[[str, tuple[int, int]], str]


def dataset_toml(
    order: MusubiOrder,
    *,
    image_directory: Directory,
    cache_directory: Directory,
    control_directory: Directory | None = None,
    caches_alone: bool = False,
) -> str:
    """Return the TOML of a run: one `[[datasets]]` block for each dataset and resolution.

    Args:
        order: the run.
        image_directory: (dataset, (width, height) in pixels) -> folder of its images or videos.
        cache_directory: the same for its caches; no two blocks may share one.
        control_directory: the same for its controls, asked for where the dataset has some.
        caches_alone: whether the script reads caches and no images, so that it needs not find their
            layers: those of a list, or of items that are skipped, would end it.
    """
    general: dict[str, Any] = {"batch_size": order.trainer.batch_size}
    endings = {dataset.caption_extension for dataset in order.datasets.values()}
    if len(endings) == 1:
        general["caption_extension"] = endings.pop()
    blocks: list[dict[str, Any]] = []
    for name, dataset in order.datasets.items():
        for resolution in order.resolutions:
            block: dict[str, Any] = {
                _kind(dataset): image_directory(name, resolution),
                "cache_directory": cache_directory(name, resolution),
            }
            if dataset.control_directory is not None and control_directory is not None:
                block["control_directory"] = control_directory(name, resolution)
            block["resolution"] = list(resolution)
            if "caption_extension" not in general:
                block["caption_extension"] = dataset.caption_extension
            block["num_repeats"] = dataset.num_repeats
            block |= shapes(dataset)
            if caches_alone:
                block.pop("multiple_target", None)
            blocks.append(block)
    return tomli_w.dumps({"general": general, "datasets": blocks})


def _kind(dataset: Dataset) -> str:
    return "video_directory" if dataset.video else "image_directory"


def shapes(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of a block that say how images are brought to size and videos cut."""
    if dataset.target_frames is None:
        bucket = dataset.fit == "bucket"
        return {
            "enable_bucket": bucket,
            "bucket_no_upscale": bucket and dataset.bucket_no_upscale,
            **_of_row(dataset),
        }
    shapes: dict[str, Any] = {
        "enable_bucket": True,  # caching puts clips into buckets whatever this says
        "target_frames": list(dataset.target_frames),
        "frame_extraction": dataset.frame_extraction,
        "frame_stride": dataset.frame_stride,
        "frame_sample": dataset.frame_sample,
        "max_frames": dataset.max_frames,
    }
    if isinstance(dataset.source_fps, float):
        shapes["source_fps"] = float(dataset.source_fps)  # an integer would be refused
    return shapes | _of_row(dataset)


def _of_row(dataset: Dataset) -> dict[str, Any]:
    """Return the keys about control images, layers and FramePack, as far as they are set."""
    keys = (
        "no_resize_control",
        "control_resolution",
        "multiple_target",
        "fp_latent_window_size",
        "fp_1f_clean_indices",
        "fp_1f_target_index",
        "fp_1f_no_post",
    )
    found = {key: getattr(dataset, key) for key in keys if dataset.first_set(key)}
    if (size := dataset.control_resolution) is not None:
        found["control_resolution"] = [size.width, size.height]
    return found


def training_toml(order: MusubiOrder) -> str:
    """Return the dataset TOML of a training on this machine; all its paths are absolute."""
    datasets = order.datasets
    # Its rules for several controls, which it would apply to skipped items too, are ours already.
    numbered = layout_of(order.model.layout_name).numbered_controls
    return dataset_toml(
        order,
        image_directory=lambda name, _: absolute(datasets[name].folder),
        cache_directory=lambda name, size: absolute(order.training_folder(name, size)),
        control_directory=None
        if numbered
        else lambda name, _: absolute(datasets[name].control_directory or ""),
        caches_alone=True,
    )
