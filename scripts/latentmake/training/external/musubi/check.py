"""Checks of the data of a training by musubi-tuner: items, caches, dataset TOML.

Nothing here imports torch, loads weights or reads tensors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from latentmake.errors import TrainingError
from latentmake.layouts.layout import layout_of
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.checks import Finding, of_faults
from latentmake.training.external.arguments import absolute
from latentmake.training.external.musubi.check_caches import (
    cache_faults,
    folder_faults,
    item_faults,
    stray_files,
)
from latentmake.training.external.musubi.dataset_toml import dataset_toml
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.image_checks import image_findings


def data_findings(order: MusubiOrder) -> Iterator[Finding]:
    """Check items, caches and dataset TOML."""
    try:
        rows = list(rows_of(Path(order.manifest)))
    except TrainingError as error:
        yield Finding("manifest", "failed", str(error))
    else:
        yield from _items(order, rows)
    number = len(order.datasets) * len(order.resolutions)
    sound = "1 folder" if number == 1 else f"{number} folders, one a dataset and resolution"
    yield of_faults("cache folders", folder_faults(order), sound)
    blocks = tomllib.loads(training_toml(order))["datasets"]
    yield of_faults("dataset TOML", _block_faults(blocks), f"parses, {len(blocks)} datasets")


def training_toml(order: MusubiOrder) -> str:
    """Return the dataset TOML of a training on this machine; all its paths are absolute."""
    datasets = order.datasets

    def control_directory(name: str, _: tuple[int, int]) -> str:
        return absolute(datasets[name].control_directory or "")

    # Its rules for several controls, which it would apply to skipped items too, are ours already.
    numbered = layout_of(order.model.layout_name).numbered_controls
    return dataset_toml(
        order,
        image_directory=lambda name, _: absolute(datasets[name].folder),
        cache_directory=lambda name, size: absolute(order.training_folder(name, size)),
        control_directory=None if numbered else control_directory,
        caches_alone=True,
    )


def _items(order: MusubiOrder, rows: Sequence[Row]) -> Iterator[Finding]:
    without = sum(row.caption is None and row.texts is None for row in rows)
    sound = f"{len(rows)} items, each with its caption"
    if without:
        sound = f"{len(rows)} items, {without} of them without a caption file"
    faults = list(item_faults(rows)) if rows else ["no item is left to train on"]
    yield of_faults("images and captions", faults, sound)
    images = (path for row in rows for path in (row.source, *row.control_files, *row.layers))
    yield from image_findings(images)
    files = sum(len(row.latents_at(size)) for row in rows for size in row.latents)
    texts = sum(len(row.texts_at(size)) for row in rows for size in row.latents)
    sound = f"{files} of latents and {texts} of text, complete"
    yield of_faults("caches", cache_faults(order, rows), sound)
    strays = [
        f"{path} is not in the manifest, but would be trained on"
        for path in stray_files(order, rows)
    ]
    yield of_faults("foreign caches", strays, "none in the cache folders")


def _block_faults(blocks: Sequence[dict[str, Any]]) -> Iterator[str]:
    for block in blocks:
        for key, value in block.items():
            if key == "cache_directory":
                continue  # see above; one of links is made before the training
            if key.endswith("_directory") and not Path(value).is_dir():
                yield f"{key} {value} is no folder"
    folders = [block.get("cache_directory") for block in blocks]
    yield from (
        f"{each} is named twice"
        for each in sorted({*filter(None, folders)})
        if folders.count(each) > 1
    )
