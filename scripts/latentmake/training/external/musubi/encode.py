"""Encoding by musubi-tuner's own scripts: run for missing targets, checked, stamped as ours.

The scripts know nothing of staleness, so they get a dataset of just these items and an empty cache
folder. Their files go through the spool like those of our encoders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError, safe_open

from latentmake.caches.job import Job
from latentmake.caches.reading import Reading
from latentmake.config import Dataset
from latentmake.errors import ModelError, SourceError
from latentmake.files import atomic
from latentmake.geometry.buckets import Size, wan_size
from latentmake.layouts import musubi
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.progress import Progress
from latentmake.training import process
from latentmake.training.external.musubi.command import (
    LATENTS_SCRIPT,
    TEXT_SCRIPT,
    latents_arguments,
    text_arguments,
)
from latentmake.training.external.musubi.dataset_toml import shapes
from latentmake.training.external.musubi.installation import find

__all__ = ["make_by_scripts"]

_FOLDER = Path(".latentmake/musubi")


def make_by_scripts(job: Job, items: Sequence[WorkItem], threads: int, progress: Progress) -> None:
    """Put the targets of some items into the spool, encoded by musubi-tuner's own scripts.

    Each source is decoded here before: one bad picture would end the script for all others.

    Raises:
        TrainingError: musubi-tuner is not where the configuration says.
        ModelError: a script failed; what it had finished is kept.
    """
    wanted: list[Reading] = []
    for reading in job.readings(items, threads, progress):
        if reading.missing:
            if job.order.kind == "latents":
                reading.samples.clear()  # pixels, which the scripts decode themselves
            wanted.append(reading)
    if not wanted:
        return
    folder = (_FOLDER / job.order.name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        failure = _run(job.order, wanted, folder)
        for each in wanted:
            for target, key in each.missing.items():
                progress.update()
                _take(job, each, target, key, _cache_folder(folder, target), failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        raise failure
    job.refuse_equal()


def _cache_folder(folder: Path, target: Target) -> Path:
    return folder / (target.part if target.size else "text")


def _run(order: WorkOrder, wanted: Sequence[Reading], folder: Path) -> ModelError | None:
    """Run a script on a dataset of just these items; return its failure."""
    assert order.musubi_tuner is not None
    installation = find(order.musubi_tuner)
    model = order.model_settings
    folder.mkdir(parents=True)
    toml = folder / "dataset.toml"
    blocks = [*_blocks(order, wanted, folder)]
    atomic.write(toml, tomli_w.dumps({"datasets": blocks}).encode())
    options: dict[str, Any] = {"dataset_config": str(toml), "skip_existing": False}
    if order.kind == "text":
        script = installation.script(TEXT_SCRIPT)
        arguments = text_arguments(model, t5=_file(model.text[0].path, "text"), **options)
    else:
        script = installation.script(LATENTS_SCRIPT)
        vae = _file(model.vae.path, "vae")
        clip = None if model.clip is None else _file(model.clip.path, "clip")
        arguments = latents_arguments(model, vae=vae, clip=clip, **options)
    log = Path(order.log).absolute()
    status, output = process.run(
        [str(installation.python), str(script), *arguments],
        environment=installation.environment(),
        log=log,
        cwd=installation.folder,
    )
    if status == 0:
        return None
    return ModelError(
        f"{script.name}: {process.last_error(output, status)}",
        hint=f"finished caches are kept; all output: {log}",
    )


def _file(path: str | None, key: str) -> str:
    place = Path(path or "")
    if not place.is_file():
        raise ModelError(
            "musubi-tuner's scripts read the one original file of a network, not a folder or a hub",
            where=f"models.*.{key}",
            hint="name that file, or leave out `encoder: musubi`",
        )
    return str(place.absolute())


def _blocks(order: WorkOrder, wanted: Sequence[Reading], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the `[[datasets]]` blocks: one for each resolution, or one for all captions."""
    dataset = order.dataset_settings
    kind = "video" if dataset.video else "image"
    parts: dict[str, tuple[tuple[int, int], list[Reading]]] = {}
    for each in wanted:
        for target in each.missing:
            place = _cache_folder(folder, target).name
            size = target.size or (512, 512)  # which no caption depends on
            found = parts.setdefault(place, (size, []))[1]
            if not found or found[-1] is not each:
                found.append(each)
    for place, (size, members) in parts.items():
        list_file = folder / f"{place}.jsonl"
        lines = [json.dumps(_line(each, kind)) for each in members]
        atomic.write(list_file, "".join(f"{line}\n" for line in lines).encode())
        yield {
            f"{kind}_jsonl_file": str(list_file),
            "cache_directory": str(folder / place),
            "resolution": list(size),
            "batch_size": 1,
            **shapes(dataset),
        }


def _line(reading: Reading, kind: str) -> dict[str, str]:
    """Return the line of an item in a list, with its caption if that is encoded."""
    item = reading.item
    if reading.samples:
        # Only the name of this file is needed, for that of the cache.
        path = str(Path(f"{item.stem}.png").absolute())
        return {f"{kind}_path": path, "caption": str(reading.samples[0].content)}
    line = {f"{kind}_path": str(Path(item.source or "").absolute()), "caption": ""}
    for number, path in enumerate(item.controls):
        key = "control_path" if kind == "video" else f"control_path_{number}"
        line[key] = str(Path(path).absolute())
    for number, path in enumerate(item.layers, 1):
        line[f"{kind}_path_{number}"] = str(Path(path).absolute())
    return line


def _take(
    job: Job, reading: Reading, target: Target, key: str, folder: Path, failure: ModelError | None
) -> None:
    """Check one file that the script wrote, and put it into the spool under our key."""
    item, path, fault = reading.item, folder / Path(target.path).name, None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        if failure is not None:
            return  # the script ended before
        fault = f"cannot be read ({error})"
    else:
        expected = _tensor_prefix(job.order.dataset_settings, item, target)
        if not any(name.startswith(expected) for name in tensors):
            fault = f"holds no tensor {expected}*, but {', '.join(tensors)}"
    if fault is not None:
        refused = SourceError(
            f"musubi-tuner's cache of it {fault}",
            where=item.source or item.stem,
            hint="see the log, or leave out `encoder: musubi`",
        )
        job.fail(item, reading.content, str(refused))
        return
    if target.size is None:
        metadata |= musubi.text_metadata(metadata.get("caption1", ""))
    job.store(item, key, reading.content, tensors, metadata)


def _tensor_prefix(settings: Dataset, item: WorkItem, target: Target) -> str:
    """Return the beginning of the name of a tensor that must be in a target's file."""
    if target.size is None or item.media is None:
        return "varlen_t5_"
    size = wan_size(
        Size(item.media.width, item.media.height),
        target.size,
        bucket=settings.fit == "bucket",
        no_upscale=settings.bucket_no_upscale,
    )
    frames = 1 if target.clip is None else (target.clip.frames - 1) // 4 + 1
    return f"latents_{frames}x{size.height // 8}x{size.width // 8}_"
