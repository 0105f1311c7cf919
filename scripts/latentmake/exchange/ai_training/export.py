"""Export of a run's caches as files of ai-training's scripts (trainer/cache-utils).

    a.img_sdvae, a.img_sdxl    safetensors, `latent` [C, h, w] in float32, posterior mean, unscaled
    a.txt_t5cache              safetensors, `emb` [T, D] in bfloat16, of the caption's own length
    a.txt_clipl                safetensors, `emb` [T, D] in float32, padded

All lie beside the image `a.jpg`. Its training reads that tensor by name and ignores the header's
metadata, which holds our key: nothing is written twice, and files of other origin are not replaced.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from latentmake import digest
from latentmake.errors import CacheError, StorageError
from latentmake.files import atomic, cachefile
from latentmake.layouts import layout
from latentmake.plan.manifest import rows_of
from latentmake.progress import Progress

if TYPE_CHECKING:
    import torch

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time
_AT_ONCE = 4096  # files that wait for a thread
_TENSORS = {"latents": "latent", "text": "emb"}


class ExportOrder(BaseModel, extra="forbid", frozen=True):
    """Order to export a run's caches.

    Attributes:
        manifest: one line an item with the paths of its caches.
        folder: of the files; None: beside the images.
        part: name of the resolution.
        ending: of files of latents; None where none are written.
        dtype: of the latents' caches.
        texts: (ending, whether it pads) of each text encoder; none where no text is written.
        text_dtype: of the embeddings' caches.
        overwrite: whether to replace files that we did not write.
    """

    run: str
    manifest: str
    folder: str | None
    part: str
    ending: str | None
    dtype: str
    texts: list[tuple[str, bool]]
    text_dtype: str
    overwrite: bool


def dtype_of(kind: str, padded: bool) -> str:
    """Return the dtype of `latents` or `text`: bfloat16 for T5, which pads nothing."""
    return "bfloat16" if kind == "text" and not padded else "float32"


def from_bytes(kind: str, padded: bool, data: bytes) -> torch.Tensor:
    """Return latents [C, h, w] or an embedding [T, D] from a file's bytes.

    Raises:
        CacheError: it is no safetensors file, or holds another tensor.
    """
    from safetensors.torch import load

    name = _TENSORS[kind]
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError):
        raise CacheError("is cut short or no safetensors file") from None
    if tensors.keys() != {name}:
        held = " and ".join(f"`{each}`" for each in sorted(tensors)) or "nothing"
        raise CacheError(f"holds {held} in place of `{name}` alone")
    found, wanted = str(tensors[name].dtype).removeprefix("torch."), dtype_of(kind, padded)
    if found != wanted:
        raise CacheError(f"`{name}` is in {found}, not in {wanted}")
    return tensors[name]


def to_bytes(kind: str, padded: bool, tensor: torch.Tensor, stamp: Mapping[str, str]) -> bytes:
    """Return a file's bytes, with our stamp as metadata."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_of(kind, padded))
    return cachefile.serialize({_TENSORS[kind]: tensor.to(dtype)}, stamp)


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
    for row in rows_of(Path(order.manifest)):
        base = row.source.rpartition(".")[0]
        if order.folder is not None:
            base = f"{order.folder}/{row.dataset}/{row.stem}"
        if order.ending is not None:
            (latents,) = row.latents_at(order.part)
            yield _File(Path(base + order.ending), latents, layout.LATENTS)
        for index, (ending, padded) in enumerate(order.texts):
            tensor = layout.hidden_state(index)
            yield _File(Path(base + ending), row.first_text, tensor, index, "text", padded)


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
