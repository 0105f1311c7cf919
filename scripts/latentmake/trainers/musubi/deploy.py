"""Folders and dataset TOML that musubi-tuner trains on.

musubi-tuner reads one text of an item: the file with the name of the item's latents. So an item
with several texts becomes several items, `{name}.v1` and so on, whose latents are links to the same
file. If each item has one text, musubi-tuner trains on the folders of the caches themselves.

musubi-tuner refuses unknown keys in the TOML, so only keys that it documents are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake.base import atomic
from latentmake.base.errors import SourceError
from latentmake.base.sync import Changes, recorded, sync
from latentmake.config.datasets import Dataset
from latentmake.config.fields import resolution_name
from latentmake.runs.rows import Row, rows_of
from latentmake.trainers.launched.order import absolute
from latentmake.trainers.musubi.order import DEPLOYED, MusubiOrder

Size = tuple[int, int]
"""Width and height of a resolution, in pixels."""

Folders = Callable[[str, Size], tuple[str, str, str]]


def deploy(order: MusubiOrder) -> Changes | None:
    """Write the dataset TOML of a run, and bring its folder of links up to date.

    Returns:
        Changes of the folder of links; None if each item has one text, so that no folder is needed.

    Raises:
        SourceError: two items would get the same name, or a cache file is missing.
    """
    atomic.write(Path(order.output, order.toml), training_toml(order).encode())
    folder, files = _folder(order), dict[str, Path]()
    several = {name for name, dataset in order.datasets.items() if dataset.text_variants > 1}
    for row in rows_of(Path(order.manifest)):
        for resolution in order.resolutions if row.dataset in several else ():
            block = PurePosixPath(order.training_folder(row.dataset, resolution)).name
            for name, path in names_of(order, row, resolution):
                if f"{block}/{name}" in files:
                    fault = f"would be trained on as {name}, as another is"
                    raise SourceError(fault, where=row.source, hint="rename one of them")
                files[f"{block}/{name}"] = path
    return sync(folder, files, link=True) if files or folder.exists() else None


def names_of(order: MusubiOrder, row: Row, resolution: Size) -> Iterator[tuple[str, Path]]:
    """Yield (name in the training folder, path) of an item's caches at one resolution.

    The first text and its latents keep the names of their files. A further text and the latents
    beside it are named `{base}.v1`, `{base}.v2` and so on.
    """
    size, base = resolution_name(*resolution), order.layout.base(row.stem)
    for number, text in enumerate(row.texts_at(size)):
        for path in (*row.latents_at(size), text):
            name = PurePosixPath(path).name
            if number:
                name = f"{base}.v{number}{name.removeprefix(base)}"
            yield name, Path(path)


def folders_of(order: MusubiOrder) -> list[str]:
    """Return the training folders, one for each dataset and resolution."""
    sizes = order.resolutions
    return [order.training_folder(name, size) for name in order.datasets for size in sizes]


def strays_of(order: MusubiOrder, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the latents in the training folders that the manifest does not name.

    musubi-tuner would train on them, because it globs for latents. Embeddings without latents do
    not matter.
    """
    named = {
        f"{order.training_folder(row.dataset, size)}/{name}"
        for row in rows
        for size in order.resolutions
        for name, _ in names_of(order, row, size)
    }
    # Links of an earlier deployment do not count: `deploy` removes them before the training.
    named |= {f"{order.output}/{DEPLOYED}/{name}" for name in recorded(_folder(order))}
    for folder in folders_of(order):
        for path in sorted(Path(folder).glob(f"*{order.layout.latents_ending}")):
            if f"{folder}/{path.name}" not in named:
                yield f"{folder}/{path.name}"


def _folder(order: MusubiOrder) -> Path:
    return Path(order.output) / DEPLOYED


# -- the dataset TOML -----------------------------------------------------------------------------


def dataset_toml(
    order: MusubiOrder,
    folders: Folders,
    *,
    caches_only: bool = False,
    batch_size: int | None = None,
) -> str:
    """Return the TOML of a run: one `[[datasets]]` block for each dataset and resolution.

    Args:
        order: order of the run.
        folders: function of (dataset, resolution) that returns the folders of images or videos, of
            caches, and of controls. No two blocks may share a folder of caches. The folder of
            controls is "" if the script reads none.
        caches_only: whether the script reads caches only. The TOML then does not mention layers:
            the script would stop if it did not find the layers of a list or of a skipped item.
        batch_size: batch size for caching; None for that of the training.
    """
    general: dict[str, Any] = {"batch_size": batch_size or order.trainer.batch_size}
    endings = {dataset.caption_extension for dataset in order.datasets.values()}
    if len(endings) == 1:
        general["caption_extension"] = endings.pop()
    blocks: list[dict[str, Any]] = []
    for name, dataset in order.datasets.items():
        kind = "video_directory" if dataset.video else "image_directory"
        for resolution in order.resolutions:
            images, caches, controls = folders(name, resolution)
            block: dict[str, Any] = {kind: images, "cache_directory": caches}
            if dataset.control_directory is not None and controls:
                block["control_directory"] = controls
            block["resolution"] = list(resolution)
            if "caption_extension" not in general:
                block["caption_extension"] = dataset.caption_extension
            block["num_repeats"] = dataset.num_repeats
            block |= shapes(dataset)
            if caches_only:
                block.pop("multiple_target", None)
            blocks.append(block)
    return tomli_w.dumps({"general": general, "datasets": blocks})


def shapes(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of a block that decide how images are resized and videos are cut."""
    bucket = dataset.fit == "bucket"
    keys: dict[str, Any] = {
        "enable_bucket": bucket,
        "bucket_no_upscale": bucket and dataset.bucket_no_upscale,
    }
    if dataset.target_frames is not None:
        keys = {
            "enable_bucket": True,  # caching uses buckets for clips with either value
            "target_frames": list(dataset.target_frames),
            "frame_extraction": dataset.frame_extraction,
            "frame_stride": dataset.frame_stride,
            "frame_sample": dataset.frame_sample,
            "max_frames": dataset.max_frames,
        }
        if isinstance(dataset.source_fps, float):
            keys["source_fps"] = float(dataset.source_fps)  # musubi-tuner refuses an integer
    further = (  # about control images, layers and FramePack
        "no_resize_control",
        "control_resolution",
        "multiple_target",
        "fp_latent_window_size",
        "fp_1f_clean_indices",
        "fp_1f_target_index",
        "fp_1f_no_post",
    )
    keys |= {key: getattr(dataset, key) for key in further if dataset.first_set(key)}
    if (size := dataset.control_resolution) is not None:
        keys["control_resolution"] = [size.width, size.height]
    return keys


def training_toml(order: MusubiOrder) -> str:
    """Return the dataset TOML of a training on this machine, with absolute paths."""

    def folders(name: str, size: Size) -> tuple[str, str, str]:
        dataset, caches = order.datasets[name], absolute(order.training_folder(name, size))
        # We apply its rules for numbered controls already. It would apply them to skipped items,
        # too, so it gets no folder of controls.
        numbered = order.layout.numbered_controls
        controls = "" if numbered else absolute(dataset.control_directory or "")
        return absolute(dataset.folder), caches, controls

    return dataset_toml(order, folders, caches_only=True)
