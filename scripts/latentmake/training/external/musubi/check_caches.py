"""Checks of a run's caches for musubi-tuner: headers, captions, stray files.

It globs its cache folders and trains on whatever fits the pattern; an item without its text cache
is dropped with a warning. Tensors are not read: they were checked when they were written.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake.config.fields import resolution_name
from latentmake.data.texts import read_caption
from latentmake.errors import SourceError
from latentmake.files.safetensors import read_head
from latentmake.plan.manifest import Row
from latentmake.training.external.musubi.deploy import linked_before, names_of
from latentmake.training.external.musubi.order import MusubiOrder


def item_faults(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each image, caption and control file of the manifest that is not there."""
    for row in rows:
        for path in (row.source, row.caption, *row.control_files, *row.layers):
            if path is not None and not Path(path).is_file():
                yield f"{path} is missing"


def cache_faults(order: MusubiOrder, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each cache file that is missing, damaged or unexpected."""
    parts = [resolution_name(*size) for size in order.resolutions]
    for row in rows:
        captions = _captions(row)
        checked: set[tuple[int, int]] = set()
        for part in parts:
            latents = row.latents_at(part)
            for kind, found in (("latents", latents), ("text", row.texts_at(part))):
                if not found:
                    yield f"{row.stem} ({row.dataset}) has no {kind} for {part}"
            texts = dict(zip(row.texts_at(part), captions, strict=False))
            for place, caption in [*((x, None) for x in latents), *texts.items()]:
                fault = _fault(order, Path(place), caption, checked)
                if fault:
                    yield f"{place} {fault}"


def _captions(row: Row) -> Sequence[str | None]:
    """Return the texts, one as it stands in its file now; None where that cannot be told."""
    if row.texts is not None:
        return row.texts
    if row.caption is None:
        return [""]
    try:
        return [read_caption(row.caption)]
    except SourceError:
        return [None]  # said elsewhere, or not to be compared


def _fault(
    order: MusubiOrder, path: Path, caption: str | None, checked: set[tuple[int, int]]
) -> str:
    """Return what is wrong with a cache file, by its header; "" if nothing is.

    `checked` are the sound files: one under several names is read once.
    """
    try:
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) in checked:
            return ""
        head = read_head(path)
        _ = head.tensors  # raises if the header is damaged
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    if head.metadata.get("architecture") != order.scripts.header:
        return f"is not a cache of {order.scripts.title} (architecture in its header)"
    if caption is not None and head.metadata.get("caption1") != caption:
        return "was made from another caption"
    checked.add((stat.st_dev, stat.st_ino))
    return ""


def stray_files(order: MusubiOrder, rows: Sequence[Row]) -> Iterator[str]:
    """Yield latents in the run's cache folders that its manifest does not name.

    The trainer would train on them all the same. Embeddings alone do no harm: an item is known by
    its latents.
    """
    named = {
        f"{order.training_folder(row.dataset, size)}/{name}"
        for row in rows
        for size in order.resolutions
        for name, _ in names_of(row, resolution_name(*size), order.model.layout_name)
    }
    named |= linked_before(order)  # and removed before the training, where they are not wanted
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.training_folder(dataset, size)
            try:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries)
            except OSError:
                continue  # said elsewhere
            for name in names:
                if name.endswith(order.layout.latents_ending) and f"{folder}/{name}" not in named:
                    yield f"{folder}/{name}"


def folder_faults(order: MusubiOrder) -> Iterator[str]:
    """Yield a line for each cache folder that is missing, shared, or among the images."""
    images = {name: os.path.realpath(each.folder) for name, each in order.datasets.items()}
    seen: dict[str, str] = {}
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.cache_folder(dataset, size)
            if not Path(folder).is_dir():
                yield f"{folder} is missing"
                continue
            path = os.path.abspath(order.training_folder(dataset, size))  # noqa: PTH100
            if path != glob.escape(path):
                yield f"{path} has one of [ ] * ? in it, with which musubi-tuner finds nothing"
                continue
            real = os.path.realpath(folder)
            if real in seen:
                yield f"{folder} is the same folder as {seen[real]}"
            seen[real] = folder
            for name, place in images.items():
                if real == place or real.startswith(place + os.sep):
                    yield f"{folder} lies among the images of {name}"
