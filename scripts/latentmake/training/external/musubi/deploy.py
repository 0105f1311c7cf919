"""Folders and dataset TOML that musubi-tuner trains on.

It reads one text of an item: that which has the name of its latents. An item with several texts is
there as several items, `{name}.v1` and so on, whose latents are links to the same file. Where each
item has one text, the folders of the caches are trained on as they are.

It refuses keys that it does not know, so none stand here but those that it documents.
"""

from __future__ import annotations

import contextlib
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake.config.datasets import Dataset
from latentmake.config.fields import resolution_name
from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import ConfigError, SourceError
from latentmake.files import atomic
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.files.sync import RECORD, Changes, recorded, sync
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.external.musubi.order import DEPLOYED, MusubiOrder
from latentmake.training.external.order import absolute
from latentmake.training.external.publish import Blocks, Files, Kind

Size = tuple[int, int]
"""Width and height of a resolution, in pixels."""

_NUMBER = re.compile(r"_\d+$")


def deploy(order: MusubiOrder) -> Changes | None:
    """Write the dataset TOML of a run and its folder of links; only changes are linked anew.

    Returns:
        None where each item has one text, so that there is no such folder.

    Raises:
        SourceError: two items would have one name, or a cache file is missing.
    """
    atomic.write(Path(order.output, "dataset.toml"), training_toml(order).encode())
    folder, files = _folder(order), dict[str, Path]()
    several = {name for name, each in order.datasets.items() if each.text_variants > 1}
    for row in rows_of(Path(order.manifest)):
        for resolution in order.resolutions if row.dataset in several else ():
            block = PurePosixPath(order.training_folder(row.dataset, resolution)).name
            for name, path in names_of(order, row, resolution):
                if f"{block}/{name}" in files:
                    fault = f"would be trained on as {name}, as another is"
                    raise SourceError(fault, where=row.source, hint="rename one of them")
                files[f"{block}/{name}"] = path
    if not files and not folder.exists():
        return None
    changes = sync(folder, files, link=True)
    if files:
        return changes
    with contextlib.suppress(OSError):  # what others put there stays
        (folder / RECORD).unlink(missing_ok=True)
        folder.rmdir()
    return None


def names_of(order: MusubiOrder, row: Row, resolution: Size) -> Iterator[tuple[str, Path]]:
    """Yield the names that an item's caches of one resolution are trained on under, and the files.

    Those of its first text are the files' own; a further text has the name `{base}.v1`, and so have
    the latents beside it.
    """
    size, base = resolution_name(*resolution), order.layout.base(row.stem)
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
        for name, _ in names_of(order, row, size)
    }
    # What an earlier deployment linked is removed before the training.
    named |= {f"{order.output}/{DEPLOYED}/{name}" for name in recorded(_folder(order))}
    for folder in folders_of(order):
        for path in sorted(Path(folder).glob(f"*{order.layout.latents_ending}")):
            if f"{folder}/{path.name}" not in named:
                yield f"{folder}/{path.name}"


def _folder(order: MusubiOrder) -> Path:
    return Path(order.output) / DEPLOYED


# -- the published folder -------------------------------------------------------------------------


def published(order: MusubiOrder, blocks: Blocks) -> Files:
    """Return the files of items and caches in a published folder."""
    files: Files = {}
    for row in rows_of(Path(order.manifest)):
        dataset = order.datasets[row.dataset]
        if dataset.is_list and (row.control_files or row.layers):
            raise of_list(row.dataset)
        # Of a list of videos the caches alone count.
        sources = [] if "path" in dataset.own_clips else [row.source, *row.layers]
        controls = row.control_files if sources else []
        for resolution in order.resolutions:
            name = blocks[row.dataset, resolution]
            files |= {f"{name}/{Path(x).name}": Path(x) for x in sources}
            files |= {f"{name}_control/{Path(x).name}": Path(x) for x in controls}
            files[f"{name}/{Path(row.stem).name}{dataset.caption_extension}"] = _caption(row)
            if order.publish.caches:
                caches = names_of(order, row, resolution)
                files |= {f"{name}_cache/{base}": path for base, path in caches}
    return files


def _caption(row: Row) -> Path | bytes:
    """Return the file of an item's caption, or the text itself where that is another."""
    if row.texts is not None:
        return f"{row.texts[0]}\n".encode()
    if row.caption is None:
        return b""
    with contextlib.suppress(OSError), Path(row.caption).open("rb") as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:  # musubi-tuner would take it for text
            return file.read()
    return Path(row.caption)


def of_list(dataset: str) -> ConfigError:
    """Return the error for a list whose control images or layers would be published."""
    what = "a published folder tells control images and layers by their names, not by a list"
    hint = "put them into folders, and name these in place of the list"
    return ConfigError(what, where=f"datasets.{dataset}.path", hint=hint)


def made_from(order: MusubiOrder, name: str, *_: Path | bytes | None) -> Iterator[tuple[Kind, str]]:
    """Yield kinds and stems of the caches made from a published file."""
    scripts, file = order.scripts, PurePosixPath(name)
    is_control = file.parent.name.endswith("_control")
    if not is_control and file.suffix.lower() not in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS:
        endings = {each.caption_extension for each in order.datasets.values()}
        longest = sorted(endings, key=len, reverse=True)
        known = next(filter(file.name.endswith, longest), file.suffix)
        yield "text", file.name.removesuffix(known)
        return
    stems = {file.stem}
    if order.version.controls[1] != 1 if is_control else scripts.layers:
        stems.add(_NUMBER.sub("", file.stem))  # `a_1` may be a control or layer of `a`
    for stem in stems:
        yield "latents", stem
        if scripts.text.reads_controls:
            yield "text", stem


# -- the dataset TOML -----------------------------------------------------------------------------


def dataset_toml(
    order: MusubiOrder,
    *,
    image_directory: Callable[[str, Size], str],
    cache_directory: Callable[[str, Size], str],
    control_directory: Callable[[str, Size], str] | None = None,
    caches_alone: bool = False,
) -> str:
    """Return the TOML of a run: one `[[datasets]]` block for each dataset and resolution.

    Args:
        order: the run.
        image_directory: (dataset, resolution) -> folder of its images or videos.
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
        kind = "video_directory" if dataset.video else "image_directory"
        for resolution in order.resolutions:
            block: dict[str, Any] = {
                kind: image_directory(name, resolution),
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


def shapes(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of a block that say how images are brought to size and videos cut."""
    bucket = dataset.fit == "bucket"
    found: dict[str, Any] = {
        "enable_bucket": bucket,
        "bucket_no_upscale": bucket and dataset.bucket_no_upscale,
    }
    if dataset.target_frames is not None:
        found = {
            "enable_bucket": True,  # caching puts clips into buckets whatever this says
            "target_frames": list(dataset.target_frames),
            "frame_extraction": dataset.frame_extraction,
            "frame_stride": dataset.frame_stride,
            "frame_sample": dataset.frame_sample,
            "max_frames": dataset.max_frames,
        }
        if isinstance(dataset.source_fps, float):
            found["source_fps"] = float(dataset.source_fps)  # an integer would be refused
    keys = (  # about control images, layers and FramePack
        "no_resize_control",
        "control_resolution",
        "multiple_target",
        "fp_latent_window_size",
        "fp_1f_clean_indices",
        "fp_1f_target_index",
        "fp_1f_no_post",
    )
    found |= {key: getattr(dataset, key) for key in keys if dataset.first_set(key)}
    if (size := dataset.control_resolution) is not None:
        found["control_resolution"] = [size.width, size.height]
    return found


def training_toml(order: MusubiOrder) -> str:
    """Return the dataset TOML of a training on this machine; all its paths are absolute."""
    datasets = order.datasets
    # Its rules for several controls, which it would apply to skipped items too, are ours already.
    numbered = order.layout.numbered_controls
    return dataset_toml(
        order,
        image_directory=lambda name, _: absolute(datasets[name].folder),
        cache_directory=lambda name, size: absolute(order.training_folder(name, size)),
        control_directory=None
        if numbered
        else lambda name, _: absolute(datasets[name].control_directory or ""),
        caches_alone=True,
    )
