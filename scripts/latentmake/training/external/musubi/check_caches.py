"""The caches of a run as musubi-tuner will find them: names, headers, captions, strangers.

It globs its cache folders and trains on whatever fits the pattern; an item without its text cache
is dropped with a warning, one of another shape ends the training at its batch. So each file is
looked at before: its name, its header's keys, shapes and metadata, and that
it is whole. Tensors are not read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake import layouts
from latentmake.errors import SourceError
from latentmake.files.safetensors import Tensor, read_head
from latentmake.geometry.buckets import Size, wan_size
from latentmake.layouts import musubi
from latentmake.sources.caption_pipeline import decode_caption
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


def item_faults(rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each image, caption and control file of the manifest that is not there."""
    for row in rows:
        for path in (row.source, row.caption, row.control):
            if path is not None and not Path(path).is_file():
                yield f"{path} is missing"


def cache_faults(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each cache file that is missing, damaged, or not what the trainer expects.

    Args:
        order: of the run.
        rows: its items.
    """
    parts = {Path(order.cache_folder("", size)).name: size for size in order.resolutions}
    for row in rows:
        yield from (
            f"{row.stem} ({row.dataset}) has no {kind} for {part}"
            for part in parts
            for kind, known in (("latents", row.latents), ("text", row.text))
            if not known.get(part)
        )
        caption = _caption(row)
        checked: set[tuple[int, int]] = set()
        for part, size in parts.items():
            folder = order.cache_folder(row.dataset, size)
            stem = layouts.of("musubi").base(row.stem)
            for path in row.latents.get(part, ()):
                fault = _apart(path, folder, stem) or _latents_fault(order, row, Path(path), size)
                if fault:
                    yield f"{path} {fault}"
            if path := row.text.get(part, ""):
                fault = _apart(path, folder, stem) or _text_fault(Path(path), caption, checked)
                if fault:
                    yield f"{path} {fault}"


def _caption(row: ManifestRow) -> str | None:
    """Return the caption as it stands in its file now; None where that cannot be told."""
    if row.written is not None:
        return row.written
    if row.caption is None:
        return ""
    try:
        return decode_caption(Path(row.caption).read_bytes(), row.caption)
    except (OSError, SourceError):
        return None  # said elsewhere, or not to be compared


def _apart(path: str, folder: str, stem: str) -> str | None:
    if os.path.normpath(Path(path).parent) != os.path.normpath(folder):
        return f"does not lie in {folder}"
    if not Path(path).name.startswith(f"{stem}_"):
        return f"is not named as {stem} is"
    return None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | str:
    try:
        head = read_head(path)
        return head.tensors, head.metadata
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def _latents_fault(
    order: MusubiOrder, row: ManifestRow, path: Path, resolution: tuple[int, int]
) -> str | None:
    name = _LATENTS_NAME.fullmatch(path.name)
    if name is None:
        return "is not named as latents of Wan are"
    read = _read(path)
    if isinstance(read, str):
        return read
    tensors, metadata = read
    if fault := _foreign(metadata):
        return fault
    width, height = int(name["w"]), int(name["h"])
    if (metadata.get("width"), metadata.get("height")) != (str(width), str(height)):
        return "has another width or height in its header than in its name"
    frames: dict[str, str] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        shape = (_CHANNELS[match["what"]], *(int(match[side]) for side in "fhw"))
        if tensor.shape != shape:
            return f"holds {key} with the shape {list(tensor.shape)}, not {list(shape)}"
        if _DTYPES.get(match["dtype"]) != tensor.dtype:
            return f"holds {key} as {tensor.dtype}"
        if match["what"] in frames:
            return f"holds several tensors {match['what']}"
        frames[match["what"]] = "x".join(match[side] for side in "fhw")
    needed = {"latents"}
    needed |= {"latents_image"} if order.model.image_to_video else set()
    needed |= {"latents_control"} if row.control is not None else set()
    if missing := sorted(needed - set(frames)):
        return f"holds no {' and no '.join(missing)}"
    if len({frames[what] for what in needed}) != 1:
        return "holds latents of different shapes"
    if order.model.needs_clip and not any(key.startswith("clip_") for key in tensors):
        return f"holds no clip, which {order.model.task} needs"
    expected = _expected(order, row, name, resolution)
    if frames["latents"] != expected:
        return f"holds latents of {frames['latents']}, where the trainer expects {expected}"
    return None


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


def _text_fault(path: Path, caption: str | None, checked: set[tuple[int, int]]) -> str | None:
    try:
        stat = path.stat()
    except OSError:
        return "is missing"
    # One file under several names, a folder each, is read once.
    if (stat.st_dev, stat.st_ino) in checked:
        return None
    read = _read(path)
    if isinstance(read, str):
        return read
    tensors, metadata = read
    if fault := _foreign(metadata):
        return fault
    texts = [tensor for key, tensor in tensors.items() if key.startswith("varlen_t5_")]
    if len(texts) != 1 or len(texts[0].shape) != 2 or texts[0].shape[0] < 1:
        return "holds no embedding (varlen_t5) of one token or more"
    if "caption1" not in metadata:
        return "does not say its caption (caption1)"
    if caption is not None and metadata["caption1"] != caption:
        return "was made from another caption"
    checked.add((stat.st_dev, stat.st_ino))
    return None


def _foreign(metadata: dict[str, str]) -> str | None:
    if metadata.get("architecture") != "wan":
        return "is not a cache of Wan (architecture in its header)"
    return None


def stray_files(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield latents in the run's cache folders that its manifest does not name.

    The trainer would train on them all the same. Embeddings alone do no harm: an item is known by
    its latents.
    """
    named = {Path(path).name: set[str]() for row in rows for path in _paths(row)}
    for row in rows:
        for path in _paths(row):
            named[Path(path).name].add(os.path.normpath(Path(path).parent))
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.cache_folder(dataset, size)
            try:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries)
            except OSError:
                continue  # said elsewhere
            for name in names:
                if name.endswith(musubi.LATENTS_ENDING) and folder not in named.get(name, set()):
                    yield f"{folder}/{name}"


def _paths(row: ManifestRow) -> Iterator[str]:
    for paths in row.latents.values():
        yield from paths


def folder_faults(order: MusubiOrder) -> Iterator[str]:
    """Yield a line for each cache folder that is missing, shared, or not apart from the images."""
    images = {name: os.path.realpath(each.path) for name, each in order.datasets.items()}
    seen: dict[str, str] = {}
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.cache_folder(dataset, size)
            if not Path(folder).is_dir():
                yield f"{folder} is missing"
                continue
            if (path := os.path.abspath(folder)) != glob.escape(path):  # noqa: PTH100
                yield f"{path} has one of [ ] * ? in it, with which musubi-tuner finds nothing"
                continue
            real = os.path.realpath(folder)
            if real in seen:
                yield f"{folder} is the same folder as {seen[real]}"
            seen[real] = folder
            for name, place in images.items():
                if real == place or real.startswith(place + os.sep):
                    yield f"{folder} lies among the images of {name}"
