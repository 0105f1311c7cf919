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

from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import CacheError, ConfigError, StorageError
from latentmake.files import atomic, cachefile
from latentmake.layouts import layout
from latentmake.models.files import text_tokens
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import rows_of, run_folder
from latentmake.progress import Progress

if TYPE_CHECKING:
    import torch

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time
_TENSORS = {"latents": "latent", "text": "emb"}


class ExportOrder(BaseModel, extra="forbid", frozen=True):
    """Order to export a run's caches.

    Attributes:
        manifest: one line an item with the paths of its caches.
        folder: of the files; None: beside the images.
        part: name of the resolution.
        ending: of files of latents; None where none are written.
        texts: (ending, whether it pads) of each text encoder; none where no text is written.
        overwrite: whether to replace files that we did not write.
    """

    run: str
    manifest: str
    folder: str | None
    part: str
    ending: str | None
    texts: list[tuple[str, bool]]
    overwrite: bool


def plan_export(facts: Facts, name: str) -> ExportOrder:
    """Return the order to export a run's caches.

    Raises:
        ConfigError: they cannot be exported.
        ModelError: a model's configuration cannot be read.
    """
    run, export = facts.config.runs[name], facts.config.export
    ending, texts = _named_files(facts, name)
    known = [size.name for size in run.resolutions]
    part = known[0] if export.resolution is None else export.resolution.name
    what = f"the run {name} has no resolution {part}" if part not in known else ""
    if export.resolution is None and len(known) > 1:
        what = f"the run {name} has the resolutions {', '.join(known)}, and ai-training's names "
        what += "have room for one"
    if what:
        hint = f"choose one of {', '.join(known)}"
        raise ConfigError(what, where="export.resolution", hint=hint)
    for dataset in run.datasets:
        if facts.config.datasets[dataset].remote and export.folder is None:
            what = f"the dataset {dataset} lies at a URL, where nothing is written"
            raise ConfigError(what, where="export.folder", hint="name a folder on this disk")
    return ExportOrder(
        run=name,
        manifest=str(run_folder(name) / "manifest.jsonl"),
        folder=export.folder,
        part=part,
        ending=ending,
        texts=texts,
        overwrite=export.overwrite,
    )


def _named_files(facts: Facts, name: str) -> tuple[str | None, list[tuple[str, bool]]]:
    """Return what files of a run's latents end in, and of each text encoder, and if it pads.

    Raises:
        ConfigError: no file is named, one is taken for another, or nothing says what they hold.
        ModelError: a model's configuration cannot be read.
    """
    run = facts.config.runs[name]
    model, where = facts.config.models[run.model], f"models.{run.model}.ai_training"
    if (named := model.ai_training) is None:
        hint = "name what ai-training's files end in: {latents: .img_sdxl, text: .txt_t5cache}"
        raise ConfigError("this key is missing", where=where, hint=hint)
    captions = {each: facts.config.datasets[each].caption_extension for each in run.datasets}
    for ending in filter(None, [named.latents, *(named.text or [])]):
        taken = [f"a caption of {each}" for each, own in captions.items() if ending.endswith(own)]
        if f".{ending.lower().rpartition('.')[2]}" in IMAGE_EXTENSIONS:
            taken.append("an image")
        if taken:
            what = f"what ends in {ending} is taken for {taken[0]}"
            raise ConfigError(what, where=where, hint="use another")
    texts = []
    for place, ending in zip(model.text, named.text or [], strict=False):
        if (tokens := text_tokens(place)) is None:
            what = "no config.json on this disk says what its caches are like"
            hint = "name a folder that has one as `path`, or the file as `config`"
            raise ConfigError(what, where=f"models.{run.model}.text", hint=hint)
        texts.append((ending, tokens.padded))
    return named.latents, texts


def _dtype_of(kind: str, padded: bool) -> str:
    """Return the dtype of `latents` or `text`: bfloat16 for T5, which pads nothing."""
    return "bfloat16" if kind == "text" and not padded else "float32"


class _File(NamedTuple):
    """A file to write, its cache file, and the name of the tensor there.

    Attributes:
        kind: `latents` or `text`.
        padded: whether the text encoder pads.
    """

    path: Path
    cache: str
    tensor: str
    kind: str = "latents"
    padded: bool = False

    def serialize(self, tensor: torch.Tensor, stamp: Mapping[str, str]) -> bytes:
        """Return its bytes, with our stamp as metadata."""
        import torch

        dtype: torch.dtype = getattr(torch, _dtype_of(self.kind, self.padded))
        return cachefile.serialize({_TENSORS[self.kind]: tensor.to(dtype)}, stamp)


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
        for file, state in zip(files, pool.map(partial(_export, order), files), strict=True):
            total[state] += 1
            if state == _LEFT:
                say(f"{file.path}: is not of latentmake's making and holds something else")
            progress.update()
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
        for n, (ending, padded) in enumerate(order.texts):
            yield _File(Path(base + ending), row.first_text, layout.hidden_state(n), "text", padded)


def _export(order: ExportOrder, file: _File) -> str:
    """Write one file unless it is up to date; return its state."""
    try:
        header, own = cachefile.read_header(file.cache), cachefile.header_of(file.path)
        if own is not None and own.key == header.key:
            return _SAME
        if own is None and file.path.is_file() and not order.overwrite:
            return _LEFT
        with safe_open(file.cache, framework="pt") as cache:
            tensor = cache.get_tensor(file.tensor)
            recipe = cache.metadata()[cachefile.RECIPE]
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"cannot be read ({error})",
            where=getattr(error, "filename", None) or file.cache,
            hint="check that the file exists and is readable",
        ) from None
    stamp = cachefile.stamp(key=header.key, source=header.source, recipe=recipe)
    try:
        atomic.write(file.path, file.serialize(tensor, stamp))
    except StorageError as error:
        if order.folder is not None or os.access(file.path.parent, os.W_OK):
            raise
        hint = "make it writable, or set export.folder to another folder"
        raise StorageError(error.what, where=file.path.parent, hint=hint) from None
    return _WRITTEN
