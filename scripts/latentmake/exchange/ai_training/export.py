"""Export: a run's caches, written as another program names them, so that both share a dataset.

The files say of which cache they are, so that nothing is written twice, and nothing of somebody
else is replaced.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from latentmake import digest
from latentmake.errors import CacheError, StorageError
from latentmake.exchange.ai_training import of
from latentmake.exchange.ai_training.orders import ExportOrder
from latentmake.files import atomic, cachefile
from latentmake.layouts import plain
from latentmake.progress import Progress

__all__ = ["STATES", "export"]

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # which wait for the disk most of the time
_AT_ONCE = 4096  # files that are waiting for a thread


class _File(NamedTuple):
    """One file to be written.

    Attributes:
        cache: path of the cache file that it is made of.
        tensor: name of the tensor there.
        number: of the text encoder, from 0; 0 of latents.
        kind: `latents` or `text`.
        padded: whether the text encoder pads.
        base: path of the file, or of the image that it lies beside, without its ending.
        ending: of the file.
    """

    cache: str
    tensor: str
    number: int
    kind: str
    padded: bool
    base: str
    ending: str


def export(order: ExportOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Write the files of a run whose caches are up to date.

    Args:
        order: which, and where.
        say: told of each file that is left as it is, and of the outcome.
        threads: how many cores to use.

    Returns:
        How many files are in which of `STATES`.

    Raises:
        CacheError: files of such names are not ours and hold something else; all others are done.
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # each file is small; they are worked on side by side
    files = list(_files(order))
    total: Counter[str] = Counter()
    pool = ThreadPoolExecutor(max(threads, _LEAST_THREADS))
    with (
        ExitStack() as stack,
        Progress(total=len(files), desc="exporting", unit="file") as progress,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)
        for start in range(0, len(files), _AT_ONCE):
            some = files[start : start + _AT_ONCE]
            for state, path in pool.map(partial(_export, order), some):
                total[state] += 1
                if state == _LEFT:
                    say(f"{path}: is not of latentmake's making and holds something else")
                progress.update()
    for line in _lost(order):
        say(line)
    say(f"{order.run}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    if total[_LEFT]:
        raise CacheError(
            f"{total[_LEFT]} files are not of latentmake's making and hold something else",
            where=f"export_{order.run}",
            mend="all others are done; remove these, or set export.overwrite to true",
        )
    return total


def _files(order: ExportOrder) -> Iterator[_File]:
    with Path(order.manifest).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "aside" in row:
                continue
            base = row["source"].rpartition(".")[0]
            if order.folder is not None:
                base = f"{order.folder}/{row['dataset']}/{row['stem']}"
            if order.ending is not None:
                cache = row["latents"][order.part]
                yield _File(cache, plain.LATENTS, 0, "latents", False, base, order.ending)
            for index, (ending, padded) in enumerate(order.texts):
                tensor = plain.hidden_state(index)
                yield _File(row["text"], tensor, index, "text", padded, base, ending)


def _lost(order: ExportOrder) -> Iterator[str]:
    """Yield a line for each kind whose caches hold less than the files could."""
    naming = of(order.naming)
    kinds = [("latents", False, order.dtype)] if order.ending else []
    kinds += [("text", padded, order.text_dtype) for _, padded in order.texts]
    for kind, padded, kept in kinds:
        wanted = naming.dtype(kind, padded)
        if wanted == "float32" and kept != wanted:
            yield f"{kind}: written in {wanted} from caches in {kept}, of no more precision"


def _export(order: ExportOrder, file: _File) -> tuple[str, Path | None]:
    """Write one file where it is not there already; return its state and path."""
    naming = of(order.naming)
    try:
        header = cachefile.read_header(file.cache)
        there = naming.find(file.base, file.ending)
        ours = None if there is None else _header(there)
        if ours is not None and ours.key == header.key:
            return _SAME, there
        data = b"" if there is None or ours is not None else there.read_bytes()
        adopted = header.adopted.split(" ")[file.number : file.number + 1]
        if data and [digest.of_bytes(data)] == adopted:
            return _SAME, there
        with safe_open(file.cache, framework="pt") as cache:
            tensor = cache.get_tensor(file.tensor)
            metadata = cache.metadata() or {}
    except (OSError, SafetensorError) as error:
        where = getattr(error, "filename", None) or file.cache
        raise CacheError(
            f"cannot be read ({error})",
            where=where,
            mend="check that the file exists and is readable",
        ) from None
    mine = (cachefile.KEY, cachefile.SOURCE, cachefile.RECIPE)
    stamp = {name: metadata[name] for name in mine}
    wanted = naming.write(file.kind, file.padded, tensor, stamp)
    if there is not None and ours is None:
        if _equal(data, wanted):
            return _SAME, there
        if not order.overwrite:
            return _LEFT, there
    original = (int(metadata.get("original_width", 0)), int(metadata.get("original_height", 0)))
    path = naming.place(file.base, file.ending, original)
    _write(path, wanted, order)
    return _WRITTEN, path


def _header(path: Path) -> cachefile.Header | None:
    """Return what a file of ours says of its making; None for a file of somebody else."""
    try:
        return cachefile.read_header(path)
    except CacheError:
        return None


def _equal(data: bytes, ours: bytes) -> bool:
    """Whether two safetensors files hold the same tensors, whatever else they say."""
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
            mend="make it writable, or set export.folder to another folder",
        ) from None
