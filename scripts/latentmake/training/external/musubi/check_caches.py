"""Checks of a run's caches for musubi-tuner: names, headers, captions, stray files.

It globs its cache folders and trains on whatever fits the pattern; an item without its text cache
is dropped with a warning, one of another shape ends the training at its batch. Tensors are not
read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake import layouts
from latentmake.config import resolution_name
from latentmake.errors import SourceError
from latentmake.files.safetensors import Tensor, read_head
from latentmake.geometry.buckets import Size, wan_size
from latentmake.sources.caption_files import read_caption
from latentmake.training.external.musubi.deploy import linked_before, names_of
from latentmake.training.external.musubi.order import ManifestRow, MusubiOrder

__all__ = ["cache_faults", "folder_faults", "item_faults", "stray_files"]

_LATENTS_NAME = re.compile(
    r"(?P<stem>.+?)(?:_(?P<start>\d{5,})-(?P<frames>\d{3,}))?_(?P<w>\d{4,})x(?P<h>\d{4,})_wan\.safetensors"
)
_KEY = re.compile(
    r"(?P<what>latents|latents_image|latents_control)_(?P<f>\d+)x(?P<h>\d+)x(?P<w>\d+)_(?P<dtype>\w+)"
)
_CHANNELS = {"latents": 16, "latents_image": 20, "latents_control": 16}
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class _FaultError(Exception):
    """Fault of one cache file."""


def item_faults(rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each image, caption and control file of the manifest that is not there."""
    for row in rows:
        for path in (row.source, row.caption, *row.control_files, *row.layers):
            if path is not None and not Path(path).is_file():
                yield f"{path} is missing"


def cache_faults(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each cache file that is missing, damaged or unexpected."""
    parts = {Path(order.cache_folder("", size)).name: size for size in order.resolutions}
    for row in rows:
        yield from (
            f"{row.stem} ({row.dataset}) has no {kind} for {part}"
            for part in parts
            for kind, known in (("latents", row.latents), ("text", row.text))
            if not known.get(part)
        )
        captions = _captions(row)
        checked: set[tuple[int, int]] = set()
        layout = layouts.of(order.model.layout_name)
        for part, size in parts.items():
            folder = order.cache_folder(row.dataset, size)
            texts = {
                text: (number, caption)
                for number, (text, caption) in enumerate(
                    zip(row.texts_at(part), captions, strict=False)
                )
            }
            for place in (*row.latents.get(part, ()), *texts):
                path = Path(place)
                try:
                    number, caption = texts.get(place, (0, None))
                    further = layout.folder(row.dataset, order.model_name, f"text.{number}@{part}")
                    _check_place(path, further if number else folder, layout.base(row.stem))
                    if place in texts:
                        _check_text(path, caption, checked)
                    else:
                        _check_latents(order, row, path, size)
                except _FaultError as fault:
                    yield f"{place} {fault}"


def _captions(row: ManifestRow) -> Sequence[str | None]:
    """Return the texts, one as it stands in its file now; None where that cannot be told."""
    if row.texts is not None:
        return row.texts
    if row.caption is None:
        return [""]
    try:
        return [read_caption(row.caption)]
    except SourceError:
        return [None]  # said elsewhere, or not to be compared


def _check_place(path: Path, folder: str, stem: str) -> None:
    if os.path.normpath(path.parent) != os.path.normpath(folder):
        raise _FaultError(f"does not lie in {folder}")
    if not path.name.startswith(f"{stem}_"):
        raise _FaultError(f"is not named as {stem} is")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, and the metadata."""
    try:
        head = read_head(path)
        tensors = head.tensors
    except FileNotFoundError:
        raise _FaultError("is missing") from None
    except OSError as error:
        raise _FaultError(f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _FaultError(str(error)) from None
    if head.metadata.get("architecture") != "wan":
        raise _FaultError("is not a cache of Wan (architecture in its header)")
    return tensors, head.metadata


def _check_latents(
    order: MusubiOrder, row: ManifestRow, path: Path, resolution: tuple[int, int]
) -> None:
    name = _LATENTS_NAME.fullmatch(path.name)
    if name is None:
        raise _FaultError("is not named as latents of Wan are")
    tensors, metadata = _read(path)
    width, height = int(name["w"]), int(name["h"])
    if (metadata.get("width"), metadata.get("height")) != (str(width), str(height)):
        raise _FaultError("has another width or height in its header than in its name")
    frames: dict[str, str] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        what = match["what"]
        shape = (_CHANNELS[what], *(int(match[side]) for side in "fhw"))
        if tensor.shape != shape:
            raise _FaultError(f"holds {key} with the shape {list(tensor.shape)}, not {list(shape)}")
        if _DTYPES.get(match["dtype"]) != tensor.dtype:
            raise _FaultError(f"holds {key} as {tensor.dtype}")
        if what in frames:
            raise _FaultError(f"holds several tensors {what}")
        frames[what] = "x".join(match[side] for side in "fhw")
    needed = {"latents"}
    needed |= {"latents_image"} if order.model.image_to_video else set()
    needed |= {"latents_control"} if row.control is not None else set()
    if missing := sorted(needed - set(frames)):
        raise _FaultError(f"holds no {' and no '.join(missing)}")
    if len({frames[what] for what in needed}) != 1:
        raise _FaultError("holds latents of different shapes")
    if order.model.needs_clip and not any(key.startswith("clip_") for key in tensors):
        raise _FaultError(f"holds no clip, which {order.model.task} needs")
    expected = _expected(order, row, name, resolution)
    if frames["latents"] != expected:
        raise _FaultError(
            f"holds latents of {frames['latents']}, where the trainer expects {expected}"
        )


def _expected(
    order: MusubiOrder, row: ManifestRow, name: re.Match[str], resolution: tuple[int, int]
) -> str:
    """Return the latents' frames, height and width that the trainer computes from a file's name."""
    size = Size(int(name["w"]), int(name["h"]))
    if name["frames"] is not None:  # the name of a clip has the size of its bucket
        return f"{(int(name['frames']) - 1) // 4 + 1}x{size.height // 8}x{size.width // 8}"
    dataset = order.datasets[row.dataset]
    bucket = wan_size(
        size,
        Size(*resolution),
        bucket=dataset.fit == "bucket",
        no_upscale=dataset.bucket_no_upscale,
    )
    return f"1x{bucket.height // 8}x{bucket.width // 8}"


def _check_text(path: Path, caption: str | None, checked: set[tuple[int, int]]) -> None:
    try:
        stat = path.stat()
    except OSError:
        raise _FaultError("is missing") from None
    # One file under several names, a folder each, is read once.
    if (stat.st_dev, stat.st_ino) in checked:
        return
    tensors, metadata = _read(path)
    texts = [tensor for key, tensor in tensors.items() if key.startswith("varlen_t5_")]
    if len(texts) != 1 or len(texts[0].shape) != 2 or texts[0].shape[0] < 1:
        raise _FaultError("holds no embedding (varlen_t5) of one token or more")
    if "caption1" not in metadata:
        raise _FaultError("does not say its caption (caption1)")
    if caption is not None and metadata["caption1"] != caption:
        raise _FaultError("was made from another caption")
    checked.add((stat.st_dev, stat.st_ino))


def stray_files(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
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
    ending = layouts.of(order.model.layout_name).latents_ending
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
                if name.endswith(ending) and f"{folder}/{name}" not in named:
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
