"""Export of a run's caches as files for ai-training's scripts (trainer/cache-utils).

    a.img_sdvae, a.img_sdxl    safetensors, `latent` [C, h, w] in float32, posterior mean, unscaled
    a.txt_t5cache              safetensors, `emb` [T, D] in bfloat16, of the caption's own length
    a.txt_clipl                safetensors, `emb` [T, D] in float32, padded

All these files are beside the image `a.jpg`. ai-training reads the tensor by its name and ignores
the metadata of the header, so our key is stored there. By the key, an unchanged file is not written
again, and a file of other origin is not replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from latentmake.base import atomic, digest
from latentmake.base.errors import CacheError, ConfigError
from latentmake.base.progress import Progress
from latentmake.config.models import Model
from latentmake.formats import cachefile
from latentmake.layouts.names import LATENTS, hidden_state
from latentmake.models.files import text_tokens
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import run_folder
from latentmake.plan.product import Difference, Made, Product, judge
from latentmake.runs.rows import rows_of

STATES = ("written", "up to date", "left, for they are not ours")
_WRITTEN, _SAME, _LEFT = STATES
_LEAST_THREADS = 4  # even on fewer cores: the threads mostly wait for the disk


class ExportOrder(BaseModel, extra="forbid", frozen=True):
    """Order to export a run's caches.

    Attributes:
        manifest: path of the manifest, with the paths of each item's caches.
        folder: folder of the files; None to write them beside the images.
        part: name of the resolution.
        ending: ending of files of latents; None if no latents are written.
        texts: (ending, whether its embeddings are padded) of each text encoder; empty if no
            embeddings are written.
        overwrite: whether to replace files that we did not write.
    """

    run: str
    manifest: str
    folder: str | None
    part: str
    ending: str | None
    texts: list[tuple[str, bool]]
    overwrite: bool


def plan_for(facts: Facts, name: str) -> ExportOrder:
    """Return the order to export a run's caches.

    Raises:
        ConfigError: the caches cannot be exported, or no `config.json` describes a text encoder.
        ModelError: a model's configuration cannot be read.
    """
    run, export = facts.config.runs[name], facts.config.export
    sizes = [size.name for size in run.resolutions]
    part = sizes[0] if export.resolution is None else export.resolution.name
    what = f"the run {name} has no resolution {part}" if part not in sizes else ""
    if export.resolution is None and len(sizes) > 1:
        what = f"the run {name} has the resolutions {', '.join(sizes)}, and ai-training's names "
        what += "have room for one"
    if what:
        hint = f"choose one of {', '.join(sizes)}"
        raise ConfigError(what, where="export.resolution", hint=hint)
    for dataset in run.datasets:
        if facts.config.datasets[dataset].remote and export.folder is None:
            what = f"the dataset {dataset} lies at a URL, where nothing is written"
            raise ConfigError(what, where="export.folder", hint="name a folder on this disk")
    model, where = facts.config.models[run.model], f"models.{run.model}"
    latents, endings = endings_of(model, where)
    texts: list[tuple[str, bool]] = []
    for place, ending in zip(model.text, endings, strict=False):
        if (tokens := text_tokens(place)) is None:
            raise undescribed(f"{where}.text")
        texts.append((ending, tokens[1]))
    return ExportOrder(
        run=name,
        manifest=str(run_folder(name) / "manifest.jsonl"),
        folder=export.folder,
        part=part,
        ending=latents,
        texts=texts,
        overwrite=export.overwrite,
    )


def endings_of(model: Model, where: str) -> tuple[str | None, list[str]]:
    """Return the endings of ai-training's latents and texts; raises ConfigError if none is set."""
    if model.ai_training is None:
        hint = "name what ai-training's files end in: {latents: .img_sdxl, text: .txt_t5cache}"
        raise ConfigError("this key is missing", where=f"{where}.ai_training", hint=hint)
    return model.ai_training.latents, model.ai_training.text or []


def undescribed(where: str) -> ConfigError:
    """Return the error for an encoder without a configuration; `where` is its key."""
    what = "no config.json on this disk says what its caches are like"
    hint = "name a folder that has one as `path`, or the file as `config`"
    return ConfigError(what, where=where, hint=hint)


_File = tuple[Path, str, str, str, str]
"""File to write, name and dtype of its tensor; cache file to read, and name of the tensor in it."""


def reasons(facts: Facts, run: str, place: str) -> list[Difference]:
    """Return why `export_{run}` would write files, whatever the `place`.

    Raises:
        CacheError: a cache cannot be read.
    """
    del place
    return [
        change._replace(name=f"{path}: {change.name}")
        for path, _, _, cache, _ in _files(plan_for(facts, run))
        for change in _differences(path, cachefile.read_header(cache))
    ]


_FOREIGN = Difference("it is not of latentmake's making and holds something else")


def _differences(path: Path, header: cachefile.Header) -> list[Difference]:
    """Return why a file is not up to date; `header` is that of its cache."""
    own = cachefile.header_of(path)
    if own is None and path.is_file():
        adopted = header.adopted and header.adopted == digest.of_file(path)
        return [] if adopted else [_FOREIGN]  # the cache may be adopted from this file
    product = Product("it has not been written yet", {"cache": header.key})
    return judge(product, own and Made(parts={"cache": own.key}))


def export(order: ExportOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Write the files of a run whose caches are up to date.

    Returns:
        Number of files in each of `STATES`.

    Raises:
        CacheError: files with these names are not ours; all other files are written.
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # our own threads convert many small files at once
    files = list(_files(order))
    total: Counter[str] = Counter()
    with (
        ThreadPoolExecutor(max(threads, _LEAST_THREADS)) as pool,
        Progress(total=len(files), desc="exporting", unit="file") as progress,
    ):
        for (path, *_), state in zip(files, pool.map(partial(_export, order), files), strict=True):
            total[state] += 1
            if state == _LEFT:
                say(f"{path}: is not of latentmake's making and holds something else")
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
            yield Path(base + order.ending), "latent", "float32", cache, LATENTS
        for number, (ending, padded) in enumerate(order.texts):
            dtype = "float32" if padded else "bfloat16"  # ai-training's CLIP pads, its T5 does not
            state = hidden_state(number)
            yield Path(base + ending), "emb", dtype, row.first_text, state


def _export(order: ExportOrder, file: _File) -> str:
    """Write one file unless it is up to date; return its state."""
    import torch

    path, name, dtype, place, tensor_name = file
    try:
        header = cachefile.read_header(place)
        if not (differences := _differences(path, header)):
            return _SAME
        if differences == [_FOREIGN] and not order.overwrite:
            return _LEFT
        with safe_open(place, framework="pt") as cache:
            tensor = cache.get_tensor(tensor_name).to(getattr(torch, dtype))
            recipe = cache.metadata()[cachefile.RECIPE]
    except (OSError, SafetensorError) as error:
        hint = "check that the file exists and is readable"
        raise CacheError(f"cannot be read ({error})", where=place, hint=hint) from None
    stamp = cachefile.stamp(key=header.key, source=header.source, recipe=recipe)
    atomic.write(path, cachefile.serialize({name: tensor}, stamp))
    return _WRITTEN
