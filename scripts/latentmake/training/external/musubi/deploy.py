"""Folders that musubi-tuner trains on: those of the caches, or of links to them.

It reads one text of an item: that which has the name of its latents. An item with several texts is
there as several items, `{name}.v1` and so on, whose latents are links to the same file. Where each
item has one text, the folders of the caches are trained on as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from latentmake.config.fields import resolution_name
from latentmake.errors import CacheError, SourceError
from latentmake.files.sync import RECORD, Changes, recorded, sync
from latentmake.layouts.layout import layout_of
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.external.musubi.order import DEPLOYED, MusubiOrder


def deploy(order: MusubiOrder) -> Changes | None:
    """Bring a run's folder of links up to date; only changes are linked anew.

    Returns:
        None where each item has one text, so that there is no such folder.
    """
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
