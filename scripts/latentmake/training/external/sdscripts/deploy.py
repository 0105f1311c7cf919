"""Folder that sd-scripts trains on: images with caches beside them, metadata, dataset TOML.

It knows no folder for caches, so that a folder of links is made, `{dataset}_{resolution}/` each,
with a `metadata.json` of captions and sizes: where it has to guess a size, it takes that of another
image whose name begins alike. An item with several texts is several images there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake.config.architectures import ARCHITECTURES, ArchitectureName
from latentmake.config.datasets import Dataset
from latentmake.config.fields import resolution_name
from latentmake.errors import CacheError, SourceError, TrainingError
from latentmake.files.sync import Changes, sync
from latentmake.layouts.layout import SIZED, SdScripts
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.external.sdscripts.order import SdScriptsOrder

METADATA = "metadata.json"

DeployedFiles = dict[str, Path | bytes]
Blocks = Mapping[tuple[str, tuple[int, int]], str]
"""(dataset, resolution) -> name of the folder of its images."""


def deploy(order: SdScriptsOrder, folder: Path) -> Changes:
    """Bring a training's folder with its `{run}.toml` up to date; only changes are linked anew."""
    blocks = default_blocks(order)
    files = deployed(order, blocks)
    for name in files:
        _refuse_old(folder, name)
    place = folder.absolute()
    text = dataset_toml(order, blocks, lambda block: (place / block).as_posix())
    return sync(folder, {**files, f"{order.run}.toml": text.encode()}, link=True)


def default_blocks(order: SdScriptsOrder) -> Blocks:
    """Return the names of the folders of images for a training here."""
    return {
        (dataset, resolution): f"{dataset}_{resolution_name(*resolution)}"
        for dataset in order.datasets
        for resolution in order.resolutions
    }


def deployed(
    order: SdScriptsOrder, blocks: Blocks | None = None, *, caches: bool = True
) -> DeployedFiles:
    """Return the folder's files: path below it, with forward slashes -> file or content.

    Args:
        order: the run.
        blocks: the folders of images; by default those of a training here.
        caches: whether caches lie beside the images; else sd-scripts makes them there.

    Raises:
        TrainingError: the manifest is missing or damaged.
        SourceError: a caption cannot be read, or two items would have one name.
        CacheError: an image or a cache file is not where the manifest says.
    """
    layout, blocks = SdScripts(order.architecture), blocks or default_blocks(order)
    files: DeployedFiles = {}
    metadata: dict[str, dict[str, Any]] = {block: {} for block in blocks.values()}
    for row in rows_of(Path(order.manifest)):
        texts = _texts(row, order.datasets[row.dataset])
        for resolution in order.resolutions:
            block = blocks[row.dataset, resolution]
            part = resolution_name(*resolution)
            (latents,) = row.latents_at(part)
            found = row.texts_at(part) or [""] * len(texts)  # of each text, its embedding if any
            for number, (text, cache) in enumerate(zip(texts, found, strict=False)):
                stem = f"{row.stem}.v{number}" if number else row.stem
                image = f"{stem}{PurePosixPath(row.source).suffix}"
                sized = SIZED.fullmatch(latents.removesuffix(layout.latents_ending))
                assert sized is not None
                named = f"{stem}_{sized[2]}x{sized[3]}{layout.latents_ending}"
                _add(files, f"{block}/{image}", row.source)
                if caches:
                    _add(files, f"{block}/{named}", latents)
                if caches and cache:
                    _add(files, f"{block}/{stem}{layout.text_ending}", cache)
                size = [int(sized[2]), int(sized[3])]
                metadata[block][image] = {"caption": text, "image_size": size}
    for block, entries in metadata.items():
        listed = json.dumps(entries, indent=1, sort_keys=True)
        files[f"{block}/{METADATA}"] = f"{listed}\n".encode()
    return files


def _texts(row: Row, settings: Dataset) -> list[str]:
    """Return an item's texts, each in one line: of several sd-scripts would take the first."""
    from latentmake.caches.inputs import caption_of

    texts = row.texts
    if texts is None:
        try:
            data = Path(row.caption).read_bytes() if row.caption else b""
        except OSError as error:
            raise SourceError(
                f"cannot be read ({error.strerror})",
                where=row.caption or "",
                hint="run the same command again",
            ) from None
        texts = [caption_of(data, row.caption, settings)]
    return [" ".join(text.splitlines()) for text in texts]


def _add(files: DeployedFiles, name: str, source: str) -> None:
    if name in files:
        raise SourceError(
            f"would be deployed as {name}, as another is",
            where=source,
            hint="rename one of them",
        )
    path = Path(source)
    if not path.is_file():
        raise CacheError("is not there", where=path, hint="run the same command again")
    files[name] = path


def _refuse_old(folder: Path, name: str) -> None:
    old = (folder / name).with_suffix(".npz")
    if not name.endswith((".npz", METADATA)) and old.is_file():
        raise TrainingError(
            "is a cache of an old kind, which sd-scripts would prefer",
            where=old,
            hint="remove it",
        )


# -- the dataset TOML -----------------------------------------------------------------------------


def dataset_toml(order: SdScriptsOrder, blocks: Blocks, directory: Callable[[str], str]) -> str:
    """Return the TOML of a run: a `[[datasets]]` block for each dataset and resolution.

    `directory` gives a block's folder, with forward slashes.
    """
    sections: list[dict[str, Any]] = []
    for name, dataset in order.datasets.items():
        for resolution in order.resolutions:
            place = directory(blocks[name, resolution])
            subset: dict[str, Any] = {
                "image_dir": place,
                "metadata_file": f"{place}/{METADATA}",
                "num_repeats": dataset.num_repeats,
                "flip_aug": dataset.flip_aug,
            }
            if dataset.alpha_mask:  # older versions do not know the key
                subset["alpha_mask"] = True
            sections.append(
                {
                    "resolution": list(resolution),
                    "batch_size": order.trainer.train_batch_size,
                    **bucket_settings(dataset, order.architecture),
                    "subsets": [subset],
                }
            )
    return tomli_w.dumps({"general": {"shuffle_caption": False}, "datasets": sections})


def bucket_settings(dataset: Dataset, architecture: ArchitectureName) -> dict[str, Any]:
    """Return a block's keys of bucketing."""
    if dataset.fit != "bucket":
        return {"enable_bucket": False}
    return {"enable_bucket": True, **dataset.bucketing(ARCHITECTURES[architecture])._asdict()}
