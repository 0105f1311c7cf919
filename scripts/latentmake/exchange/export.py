"""Export of a run's caches as files of ai-training's scripts (trainer/cache-utils).

    a.img_sdvae, a.img_sdxl    safetensors, `latent` [C, h, w] in float32, posterior mean, unscaled
    a.txt_t5cache              safetensors, `emb` [T, D] in bfloat16, of the caption's own length
    a.txt_clipl                safetensors, `emb` [T, D] in float32, padded

All lie beside the image `a.jpg`. Its training reads that tensor by name and ignores the header's
metadata, which holds our key: nothing is written twice, and files of other origin are not replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from latentmake import digest
from latentmake.config.models import Model
from latentmake.errors import CacheError, ConfigError
from latentmake.files import atomic, cachefile
from latentmake.layouts.tensors import LATENTS, hidden_state
from latentmake.models.shapes import text_tokens
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import run_folder
from latentmake.progress import Progress
from latentmake.training.rows import rows_of

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time


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
        ConfigError: they cannot be exported, or nothing says what files hold.
        ModelError: a model's configuration cannot be read.
    """
    run, export = facts.config.runs[name], facts.config.export
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
    model, where = facts.config.models[run.model], f"models.{run.model}"
    if (named := model.ai_training) is None:
        hint = "name what ai-training's files end in: {latents: .img_sdxl, text: .txt_t5cache}"
        raise ConfigError("this key is missing", where=f"{where}.ai_training", hint=hint)
    return ExportOrder(
        run=name,
        manifest=str(run_folder(name) / "manifest.jsonl"),
        folder=export.folder,
        part=part,
        ending=named.latents,
        texts=[*_texts(model, named.text or [], f"{where}.text")],
        overwrite=export.overwrite,
    )


def _texts(model: Model, endings: list[str], where: str) -> Iterator[tuple[str, bool]]:
    for place, ending in zip(model.text, endings, strict=False):
        if (tokens := text_tokens(place)) is None:
            what = "no config.json on this disk says what its caches are like"
            hint = "name a folder that has one as `path`, or the file as `config`"
            raise ConfigError(what, where=where, hint=hint)
        yield ending, tokens.padded


class _File(NamedTuple):
    """A file to write: its path, tensor and dtype; and the cache file, with the name there."""

    path: Path
    name: str
    dtype: str
    cache: str
    tensor: str


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
        what = f"{total[_LEFT]} files are not of latentmake's making and hold something else"
        hint = "all others are done; remove these, or set export.overwrite to true"
        raise CacheError(what, where=f"export_{order.run}", hint=hint)
    return total


def _files(order: ExportOrder) -> Iterator[_File]:
    for row in rows_of(Path(order.manifest)):
        base = row.source.rpartition(".")[0]
        if order.folder is not None:
            base = f"{order.folder}/{row.dataset}/{row.stem}"
        if order.ending is not None:
            (cache,) = row.latents_at(order.part)
            yield _File(Path(base + order.ending), "latent", "float32", cache, LATENTS)
        for number, (ending, padded) in enumerate(order.texts):
            dtype = "float32" if padded else "bfloat16"  # T5 pads nothing
            state = hidden_state(number)
            yield _File(Path(base + ending), "emb", dtype, row.first_text, state)


def _export(order: ExportOrder, file: _File) -> str:
    """Write one file unless it is up to date; return its state."""
    import torch

    try:
        header, own = cachefile.read_header(file.cache), cachefile.header_of(file.path)
        if own is not None and own.key == header.key:
            return _SAME
        if own is None and file.path.is_file():
            if header.adopted and header.adopted == digest.of_file(file.path):
                return _SAME  # the cache was taken from it
            if not order.overwrite:
                return _LEFT
        with safe_open(file.cache, framework="pt") as cache:
            tensor = cache.get_tensor(file.tensor).to(getattr(torch, file.dtype))
            recipe = cache.metadata()[cachefile.RECIPE]
    except (OSError, SafetensorError) as error:
        hint = "check that the file exists and is readable"
        raise CacheError(f"cannot be read ({error})", where=file.cache, hint=hint) from None
    stamp = cachefile.stamp(key=header.key, source=header.source, recipe=recipe)
    atomic.write(file.path, cachefile.serialize({file.name: tensor}, stamp))
    return _WRITTEN
