"""`publish_{run}`: the folder that a user carries to the machine that trains.

Images, captions and caches in the folders that musubi-tuner wants, and beside them the dataset TOML
and the script of each system, with the paths that this system knows.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from latentmake import layouts
from latentmake.config import resolution_name
from latentmake.errors import CacheError, SourceError, TrainingError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.index.remembered import Memory
from latentmake.layouts import musubi
from latentmake.models.wan_files import model_files
from latentmake.sources.items import IMAGE_EXTENSIONS
from latentmake.training.checks import Finding, passed
from latentmake.training.external import publication_checks
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi import command
from latentmake.training.external.musubi.dataset_toml import shapes
from latentmake.training.external.musubi.installation import find as find_tuner
from latentmake.training.external.musubi.order import ManifestRow, MusubiOrder
from latentmake.training.external.musubi.preflight import model_finding, precision
from latentmake.training.external.musubi.published_texts import Texts
from latentmake.training.external.publication_checks import SYSTEMS, attention, elsewhere
from latentmake.training.external.publish import bring, published_folder, script_files, writable
from latentmake.training.external.published_caches import SETTINGS, PublishedCaches, settings_files
from latentmake.training.external.result import rows_of

__all__ = ["findings", "publish"]

Say = Callable[[str], None]


def publish(order: MusubiOrder, say: Say) -> None:
    """Bring the published folder of a run up to date: only what changed is copied.

    The folder is `{publish.path}/{run}`. What an earlier publication put there and no item owns any
    longer is removed; nothing else is.

    Args:
        order: the run.
        say: says a line to the user.

    Raises:
        ConfigError: the configuration says too little for a publication.
        TrainingError: the manifest is missing or damaged.
        SourceError: an image, video, caption or control cannot be read.
        CacheError: a cache file is not where the manifest says.
        StorageError: the folder cannot be written; finished work is kept.
    """
    published = published_folder(order)
    folder = writable(published, order, "musubi-tuner")
    text = Texts(order, published)
    passed(_findings(order, text), say)
    files = _members(order, text.blocks)
    files |= {
        f"{order.run}_linux.toml": text.dataset("linux").encode(),
        f"{order.run}_win.toml": text.dataset("windows").encode(),
        **script_files(order, {system: text.commands(system) for system in SYSTEMS}),
    }
    if order.publish.caches:
        bring(order, folder, files, published, say)
        _tell_of_strangers(folder, files, say)
        return
    made = PublishedCaches(folder, layouts.of("musubi"), musubi.TEXT_ENDING)
    bring(order, folder, files, published, say, partial(_drop, order, made))
    made.tell(order.run, say)


def findings(order: MusubiOrder, memory: Memory | None = None) -> list[Finding]:
    """Check what would be published, before anything is encoded or copied.

    Args:
        order: the run.
        memory: keeps what is found out about the trainer; None asks anew.

    Raises:
        ConfigError: the configuration says too little for a publication.
    """
    return [*_findings(order, Texts(order, published_folder(order)), memory)]


def _findings(order: MusubiOrder, text: Texts, memory: Memory | None = None) -> Iterator[Finding]:
    # Its environment may lie on the trainer's machine alone.
    place = text.tuner.model_copy(update={"venv": None})
    models = [*model_files(order.model)]
    for file in models:
        if file.key in text.left_out:
            yield Finding(f"model: {file.key}", "warning", text.left_out[file.key])
        elif file.place and not Path(file.place).exists():
            yield elsewhere(f"model: {file.key}", file.place)
        else:
            yield model_finding(file)
    chosen = order.publish.attention is not None
    yield attention(text.attention, command.ATTENTIONS, "musubi-tuner", chosen)
    if text.attention not in command.ATTENTIONS:
        return

    def find() -> Installation:
        return find_tuner(place, memory)

    yield from publication_checks.findings(
        commands={system: text.commands(system) for system in SYSTEMS},
        tomls={system: text.dataset(system) for system in SYSTEMS},
        names=text.names,
        folder=place.path,
        find=find,
        further=order.trainer.arguments,
        accelerate_config=order.trainer.accelerate_config,
    )
    if Path(place.path).is_dir():
        with contextlib.suppress(TrainingError):  # told above
            yield precision(order, models, find())


def _drop(order: MusubiOrder, made: PublishedCaches, name: str) -> None:
    """Drop the caches made from a file before it is replaced."""
    place, _, base = name.rpartition("/")
    if base in SETTINGS:
        made.drop(place, SETTINGS[base])
    elif place:
        block = place.removesuffix("_control")
        stem, _, ending = base.rpartition(".")
        if block == place and f".{ending.lower()}" not in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS:
            endings = {dataset.caption_extension for dataset in order.datasets.values()}
            whole = next(filter(base.endswith, sorted(endings, key=len, reverse=True)), None)
            made.drop(f"{block}_cache", "text", base.removesuffix(whole) if whole else stem)
        else:
            made.drop(f"{block}_cache", "latents", stem)


def _members(
    order: MusubiOrder, blocks: Mapping[tuple[str, tuple[int, int]], str]
) -> dict[str, Path | bytes]:
    """Return what belongs to the items: path below the published folder -> source or content.

    Names are flat, as musubi-tuner reads its folders.
    """
    files: dict[str, Path | bytes] = {}
    if not order.publish.caches:
        for (dataset, resolution), name in blocks.items():
            files |= settings_files(
                f"{name}_cache",
                latents=[order.model.vae.path, *_latents_settings(order, dataset, resolution)],
                text=[order.model.text[0].path, order.model.fp8_t5],
            )
    for row in rows_of(Path(order.manifest), ManifestRow):
        ending = order.datasets[row.dataset].caption_extension
        for resolution in order.resolutions:
            name = blocks[row.dataset, resolution]
            files[f"{name}/{Path(row.source).name}"] = Path(row.source)
            files[f"{name}/{Path(row.stem).name}{ending}"] = _caption(row)
            if row.control is not None:
                files[f"{name}_control/{Path(row.control).name}"] = Path(row.control)
            if order.publish.caches:
                size = resolution_name(*resolution)
                for cache in (*row.latents[size], row.text[size]):
                    files[f"{name}_cache/{Path(cache).name}"] = Path(cache)
    for path in {path for path in files.values() if isinstance(path, Path)}:
        if not path.is_file():
            kind = CacheError if path.suffix == ".safetensors" else SourceError
            raise kind("is not there", where=path, mend="give the same command again")
    return files


def _latents_settings(order: MusubiOrder, dataset: str, resolution: tuple[int, int]) -> list[Any]:
    """Return the settings of latents besides the VAE's file; of files, the paths."""
    model = order.model
    clip = None if model.clip is None else model.clip.path
    return [
        model.vae_dtype or model.dtype,
        model.task,
        clip,
        resolution,
        shapes(order.datasets[dataset]),
    ]


def _caption(row: ManifestRow) -> Path | bytes:
    """Return the file of an item's caption, or the text itself where that is another."""
    if row.written is not None:
        return f"{row.written}\n".encode()
    return b"" if row.caption is None else Path(row.caption)


def _tell_of_strangers(folder: Path, files: Iterable[str], say: Say) -> None:
    """Say which cache files were not published: musubi-tuner trains on all that lie there."""
    caches: dict[str, set[str]] = defaultdict(set)
    for name in files:
        place, _, base = name.rpartition("/")
        if place.endswith("_cache"):
            caches[place].add(base)
    for place, known in caches.items():
        found = {path.name for path in (folder / place).glob("*_wan.safetensors")}
        if strange := sorted(found - known):
            say(
                f"{folder / place} holds cache files that no item owns, and musubi-tuner trains on "
                f"them: {', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''}; remove them"
            )
