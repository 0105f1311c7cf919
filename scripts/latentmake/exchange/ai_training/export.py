"""Export of a run's caches as ai-training's files.

The files hold our key: nothing is written twice, and files of other origin are not replaced.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from latentmake import digest
from latentmake.errors import CacheError, StorageError
from latentmake.exchange.ai_training.naming import dtype_of, to_bytes
from latentmake.exchange.ai_training.orders import ExportOrder
from latentmake.files import atomic, cachefile
from latentmake.layouts import plain
from latentmake.progress import Progress

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time
_AT_ONCE = 4096  # files that wait for a thread


class _File(NamedTuple):
    """A file to write, its cache file, and the name of the tensor there.

    Attributes:
        number: of the text encoder, from 0; 0 for latents.
        kind: `latents` or `text`.
        padded: whether the text encoder pads.
    """

    path: Path
    cache: str
    tensor: str
    number: int = 0
    kind: str = "latents"
    padded: bool = False


def export(order: ExportOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Write the files of a run whose caches are up to date.

    Returns:
        Number of files in each of `STATES`.

    Raises:
        CacheError: files of such names are not ours and hold something else; all others are done.
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # many small files, one in each of our threads
    files = list(_files(order))
    total: Counter[str] = Counter()
    with (
        ThreadPoolExecutor(max(threads, _LEAST_THREADS)) as pool,
        Progress(total=len(files), desc="exporting", unit="file") as progress,
    ):
        for start in range(0, len(files), _AT_ONCE):
            some = files[start : start + _AT_ONCE]
            for file, state in zip(some, pool.map(partial(_export, order), some), strict=True):
                total[state] += 1
                if state == _LEFT:
                    say(f"{file.path}: is not of latentmake's making and holds something else")
                progress.update()
    for line in _lost(order):
        say(line)
    say(f"{order.run}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    if total[_LEFT]:
        raise CacheError(
            f"{total[_LEFT]} files are not of latentmake's making and hold something else",
            where=f"export_{order.run}",
            hint="all others are done; remove these, or set export.overwrite to true",
        )
    return total


def _files(order: ExportOrder) -> Iterator[_File]:
    with Path(order.manifest).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "aside" in row:
                continue
            base = row["source"].rpartition(".")[0]
            if order.folder is not None:
                base = f"{order.folder}/{row['dataset']}/{row['stem']}"
            if order.ending is not None:
                yield _File(Path(base + order.ending), row["latents"][order.part], plain.LATENTS)
            for index, (ending, padded) in enumerate(order.texts):
                tensor = plain.hidden_state(index)
                yield _File(Path(base + ending), row["text"], tensor, index, "text", padded)


def _lost(order: ExportOrder) -> Iterator[str]:
    """Yield a line for each kind whose caches have less precision than the files."""
    kinds = [("latents", False, order.dtype)] if order.ending else []
    kinds += [("text", padded, order.text_dtype) for _, padded in order.texts]
    for kind, padded, kept in kinds:
        wanted = dtype_of(kind, padded)
        if wanted == "float32" and kept != wanted:
            yield f"{kind}: written in {wanted} from caches in {kept}, of no more precision"


def _export(order: ExportOrder, file: _File) -> str:
    """Write one file unless it is up to date; return its state."""
    existing = None
    try:
        header = cachefile.read_header(file.cache)
        if file.path.is_file():
            ours = _header(file.path)
            if ours is not None and ours.key == header.key:
                return _SAME
            existing = file.path.read_bytes() if ours is None else None
        adopted = header.adopted.split(" ")[file.number : file.number + 1]
        if existing and [digest.of_bytes(existing)] == adopted:
            return _SAME
        with safe_open(file.cache, framework="pt") as cache:
            tensor = cache.get_tensor(file.tensor)
            metadata = cache.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"cannot be read ({error})",
            where=getattr(error, "filename", None) or file.cache,
            hint="check that the file exists and is readable",
        ) from None
    recipe = metadata[cachefile.RECIPE]
    stamp = cachefile.stamp(key=header.key, source=header.source, recipe=recipe)
    wanted = to_bytes(file.kind, file.padded, tensor, stamp)
    if existing is not None:
        if _equal(existing, wanted):
            return _SAME
        if not order.overwrite:
            return _LEFT
    _write(file.path, wanted, order)
    return _WRITTEN


def _header(path: Path) -> cachefile.Header | None:
    """Return the header of a file of ours; None for another file."""
    try:
        return cachefile.read_header(path)
    except CacheError:
        return None


def _equal(data: bytes, ours: bytes) -> bool:
    """Whether two safetensors files hold equal tensors; metadata may differ."""
    from safetensors.torch import load

    try:
        theirs, wanted = load(data), load(ours)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError):
        return False
    return theirs.keys() == wanted.keys() and all(
        theirs[name].dtype == wanted[name].dtype and theirs[name].equal(wanted[name])
        for name in wanted
    )


def _write(path: Path, data: bytes, order: ExportOrder) -> None:
    try:
        atomic.write(path, data)
    except StorageError as error:
        if order.folder is not None or os.access(path.parent, os.W_OK):
            raise
        raise StorageError(
            error.what,
            where=path.parent,
            hint="make it writable, or set export.folder to another folder",
        ) from None
