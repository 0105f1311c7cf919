"""Folders and dataset TOML that musubi-tuner trains on.

It reads one text of an item: that which has the name of its latents. An item with several texts is
there as several items, `{name}.v1` and so on, whose latents are links to the same file. Where each
item has one text, the folders of the caches are trained on as they are.

It refuses keys that it does not know, so none stand here but those that it documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake.config.datasets import Dataset
from latentmake.config.fields import resolution_name
from latentmake.errors import CacheError, SourceError
from latentmake.files import atomic
from latentmake.files.sync import RECORD, Changes, recorded, sync
from latentmake.layouts.layout import layout_of
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.external.musubi.order import DEPLOYED, MusubiOrder
from latentmake.training.external.order import absolute


def deploy(order: MusubiOrder) -> Changes | None:
    """Write the dataset TOML of a run and its folder of links; only changes are linked anew.

    Returns:
        None where each item has one text, so that there is no such folder.
    """
    atomic.write(Path(order.output, "dataset.toml"), training_toml(order).encode())
    folder = _folder(order)
    files = deployed(order, rows_of(Path(order.manifest)))
    if not files and not folder.exists():
        return None
    changes = sync(folder, files, link=True)
    if files:
        return changes
    with contextlib.suppress(OSError):  # what others put there stays
        (folder / RECORD).unlink(missing_ok=True)
        folder.rmdir()
    return None


def deployed(order: MusubiOrder, rows: Iterable[Row]) -> dict[str, Path]:
    """Return the files of the folder of links: path below it -> cache file.

    Raises:
        SourceError: two items would have one name.
        CacheError: a cache file is not where the manifest says.
    """
    files: dict[str, Path] = {}
    for row in rows:
        if order.datasets[row.dataset].text_variants == 1:
            continue
        for resolution in order.resolutions:
            size = resolution_name(*resolution)
            block = PurePosixPath(order.training_folder(row.dataset, resolution)).name
            for name, path in names_of(row, size, order.model.layout_name):
                place = f"{block}/{name}"
                if place in files:
                    raise SourceError(
                        f"would be trained on as {name}, as another is",
                        where=row.source,
                        hint="rename one of them",
                    )
                if not path.is_file():
                    raise CacheError("is not there", where=path, hint="run the same command again")
                files[place] = path
    return files


def names_of(row: Row, size: str, layout: str) -> Iterator[tuple[str, Path]]:
    """Yield the names that an item's caches of one resolution are trained on under, and the files.

    Those of its first text are the files' own; a further text has the name `{base}.v1`, and so have
    the latents beside it.
    """
    base = layout_of(layout).base(row.stem)
    for number, text in enumerate(row.texts_at(size)):
        for path in (*row.latents_at(size), text):
            name = PurePosixPath(path).name
            if number:
                name = f"{base}.v{number}{name.removeprefix(base)}"
            yield name, Path(path)


def folders_of(order: MusubiOrder) -> list[str]:
    """Return the folders that are trained on, one for each dataset and resolution."""
    sizes = order.resolutions
    return [order.training_folder(name, size) for name in order.datasets for size in sizes]


def strays_of(order: MusubiOrder, rows: Iterable[Row]) -> Iterator[str]:
    """Yield latents in the folders that are trained on which the manifest does not name.

    musubi-tuner globs them. Embeddings alone do no harm: it knows an item by its latents.
    """
    named = {
        f"{order.training_folder(row.dataset, size)}/{name}"
        for row in rows
        for size in order.resolutions
        for name, _ in names_of(row, resolution_name(*size), order.model.layout_name)
    }
    # What an earlier deployment linked is removed before the training.
    named |= {f"{order.output}/{DEPLOYED}/{name}" for name in recorded(_folder(order))}
    for folder in folders_of(order):
        for path in sorted(Path(folder).glob(f"*{order.layout.latents_ending}")):
            if f"{folder}/{path.name}" not in named:
                yield f"{folder}/{path.name}"


def _folder(order: MusubiOrder) -> Path:
    return Path(order.output) / DEPLOYED


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
