"""The checklist before a Wan training: all that can be known in seconds, before hours are spent.

Nothing here imports torch, loads weights or reads tensors. A line is `failed` where the training
would surely end or learn from the wrong files, `warning` where that depends.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import ExifTags, Image
from tabulate import tabulate

from latentmake.errors import LatentmakeError, TrainingError
from latentmake.musubi.caches import cache_faults, folder_faults, item_faults, stray_files
from latentmake.musubi.command import TRAINING_SCRIPT, training_arguments
from latentmake.musubi.dataset_toml import dataset_toml
from latentmake.musubi.installation import Installation, pick_attention
from latentmake.musubi.model_files import ModelFile, lora_bytes, model_files, number_format
from latentmake.musubi.order import ManifestRow, MusubiOrder
from latentmake.musubi.weights import weight_file
from latentmake.trainers.launched import Layout, rows_of

__all__ = [
    "Finding",
    "check",
    "checklist",
    "command_arguments",
    "failed",
    "refuse_failed",
    "training_toml",
]

Verdict = Literal["ok", "warning", "failed"]
_SHOWN = 3  # faults of one check that are named
_LEAST_SPACE = 200_000_000  # bytes
_STATE = 6  # a state's size in LoRAs: weights and two moments, in 32 bits each


class Finding(NamedTuple):
    """One line of the checklist: what was looked at, what came of it, and why."""

    what: str
    verdict: Verdict
    note: str


def check(order: MusubiOrder) -> list[Finding]:
    """Look at all that a training needs; relative paths are those of the working directory."""
    findings: list[Finding] = []
    rows: list[ManifestRow] = []
    try:
        rows = list(rows_of(Path(order.manifest), ManifestRow))
    except TrainingError as error:
        findings.append(Finding("manifest", "failed", str(error)))
    else:
        findings += _items(order, rows)
    findings.append(_folders(order))
    findings.append(_toml(order))
    models = list(model_files(order.model))
    findings += [_model(each) for each in models]
    findings += _trainer(order, models)
    findings.append(_space(order, models))
    return findings


def failed(findings: Iterable[Finding]) -> bool:
    """Tell whether anything stands against a training."""
    return any(finding.verdict == "failed" for finding in findings)


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Do nothing where no line has failed.

    Raises:
        TrainingError: names the lines that have.
    """
    lines = [f"{each.what}: {each.note}" for each in findings if each.verdict == "failed"]
    if lines:
        raise TrainingError(f"{len(lines)} of the checklist failed: {' | '.join(lines)}")


def checklist(findings: Iterable[Finding]) -> str:
    """Return the checklist as a table, a verdict each."""
    return tabulate(
        [[each.what, each.verdict, each.note] for each in findings],
        headers=["checked", "verdict", "note"],
        disable_numparse=True,
        colalign=["left"] * 3,
    )


def training_toml(order: MusubiOrder) -> str:
    """Return the dataset TOML of a training on this machine; all its paths are absolute."""
    return dataset_toml(
        order,
        image_directory=lambda name, _: os.path.abspath(order.datasets[name].path),  # noqa: PTH100
        cache_directory=lambda name, size: os.path.abspath(order.cache_folder(name, size)),  # noqa: PTH100
        control_directory=lambda name, _: os.path.abspath(  # noqa: PTH100
            order.datasets[name].control_directory or ""
        ),
    )


def command_arguments(
    order: MusubiOrder, *, attention: str, resume: Path | None = None
) -> list[str]:
    """Return the arguments of a training on this machine; all its paths are absolute."""
    layout = Layout(order.run, order.output)
    high = order.model.dit_high_noise
    return training_arguments(
        order,
        dataset_config=_absolute(layout.dataset_config),
        dit=_network(order.model.dit or ""),
        dit_high_noise=None if high is None else _network(high),
        output_dir=_absolute(layout.work),
        output_name=order.run,
        logging_dir=_absolute(layout.logs) if order.trainer.logging else None,
        attention=attention,
        resume=None if resume is None else _absolute(resume),
    )


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 -- links stay


def _network(place: str) -> str:
    """Return the file that stands for a network: of several, musubi-tuner is given the first."""
    try:
        return _absolute(weight_file(Path(place)))
    except ValueError:
        return _absolute(place)


def _of(what: str, faults: Iterable[str], sound: str) -> Finding:
    """Return a finding that has failed where there are faults; the first ones are named."""
    found = list(faults)
    if not found:
        return Finding(what, "ok", sound)
    rest = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Finding(what, "failed", "; ".join(found[:_SHOWN]) + rest)


# -- what is trained on ------------------------------------------------------------------------


def _items(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[Finding]:
    without = sum(row.caption is None and row.written is None for row in rows)
    sound = f"{len(rows)} items, each with its caption"
    if without:
        sound = f"{len(rows)} items, {without} of them without a caption file"
    faults = list(item_faults(rows)) if rows else ["no item is left to train on"]
    yield _of("images and captions", faults, sound)
    if turned := sum(_is_turned(row.source) for row in rows):
        note = f"{turned} images are stored turned (EXIF), which musubi-tuner does not heed"
        yield Finding("EXIF orientation", "warning", note)
    files = sum(len(paths) for row in rows for paths in row.latents.values())
    texts = sum(len(row.text) for row in rows)
    sound = f"{files} of latents and {texts} of text, complete and whole"
    yield _of("caches", cache_faults(order, rows), sound)
    strays = [
        f"{path} is not in the manifest, but would be trained on"
        for path in stray_files(order, rows)
    ]
    yield _of("foreign caches", strays, "none in the cache folders")


def _is_turned(path: str) -> bool:
    if not path.lower().endswith((".jpg", ".jpeg", ".webp")):
        return False  # of a PNG, all pixels are read before its EXIF is known
    try:
        with Image.open(path) as image:
            return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False  # said elsewhere


def _folders(order: MusubiOrder) -> Finding:
    number = len(order.datasets) * len(order.resolutions)
    sound = "1 folder" if number == 1 else f"{number} folders, one a dataset and resolution"
    return _of("cache folders", folder_faults(order), sound)


def _toml(order: MusubiOrder) -> Finding:
    try:
        parsed = tomllib.loads(training_toml(order))
    except (LatentmakeError, ValueError) as error:
        return Finding("dataset TOML", "failed", f"does not parse ({error})")
    blocks = parsed.get("datasets", [])
    return _of("dataset TOML", _block_faults(blocks), f"parses, {len(blocks)} datasets")


def _block_faults(blocks: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not blocks:
        yield "has no datasets"
    for block in blocks:
        for key, value in block.items():
            if key.endswith("_directory") and not Path(value).is_dir():
                yield f"{key} {value} is no folder"
    folders = [block.get("cache_directory") for block in blocks]
    yield from (
        f"{each} is named twice"
        for each in sorted({*filter(None, folders)})
        if folders.count(each) > 1
    )


# -- what is trained ---------------------------------------------------------------------------


def _model(file: ModelFile) -> Finding:
    place = f"{file.place}: " if file.place else ""
    if file.fault:
        return Finding(f"model: {file.key}", "failed", f"{place}{file.fault}")
    if file.doubt:
        return Finding(f"model: {file.key}", "warning", f"{place}{file.doubt}")
    assert file.content is not None
    return Finding(f"model: {file.key}", "ok", f"{file.place}: {file.content.kind}")


def _precision(order: MusubiOrder, models: Sequence[ModelFile], tuner: Installation) -> Finding:
    asked = order.trainer.mixed_precision
    for file in models:
        held = number_format(file.content) if file.content and file.key.startswith("dit") else None
        if held in ("bf16", "fp16") and asked not in (held, "no"):
            verdict: Verdict = "failed" if tuner.sources.demands_precision else "warning"
            note = f"{file.key} is in {held}: set `mixed_precision: {held}`, not {asked}"
            return Finding("mixed precision", verdict, note)
    return Finding("mixed precision", "ok", asked)


# -- what trains -------------------------------------------------------------------------------


def _trainer(order: MusubiOrder, models: Sequence[ModelFile]) -> Iterator[Finding]:
    if order.musubi_tuner is None:
        note = "the configuration does not say where it lies: set `musubi_tuner.path`"
        yield Finding("musubi-tuner", "failed", note)
        return
    try:
        tuner = Installation.find(order.musubi_tuner)
        verdict: Verdict = "warning" if tuner.note else "ok"
        script = tuner.script(TRAINING_SCRIPT)
        yield Finding("musubi-tuner", verdict, tuner.note or str(script))
        yield from _environment(order, tuner)
    except TrainingError as error:
        yield Finding("musubi-tuner", "failed", str(error))
        return
    yield _precision(order, models, tuner)
    attention = "sdpa"
    try:
        attention = pick_attention(order.trainer.attention, tuner)
        yield Finding("attention", "ok", attention)
    except TrainingError as error:
        yield Finding("attention", "failed", str(error))
    yield _arguments(order, tuner, attention)


def _arguments(order: MusubiOrder, tuner: Installation, attention: str) -> Finding:
    if tuner.flags() is None:
        note = "which flags it knows cannot be told from its sources"
        return Finding("arguments", "ok", note)
    resume = Path("state") if order.trainer.save_every_n_epochs else None
    missing = tuner.missing_flags(command_arguments(order, attention=attention, resume=resume))
    if missing:
        note = f"this musubi-tuner is too old for {' '.join(missing)}: update it"
        return Finding("arguments", "failed", note)
    return Finding("arguments", "ok", "it knows all flags")


def _environment(order: MusubiOrder, tuner: Installation) -> Iterator[Finding]:
    needs = set(tuner.sources.needs)
    eight_bit = order.trainer.optimizer_type.lower().endswith("8bit")
    if eight_bit and tuner.sources.mentions("bitsandbytes"):
        needs.add("bitsandbytes")
    there = tuner.can_import(sorted(needs | {"accelerate"}))
    missing = sorted(name for name in needs if not there[name])
    if missing:
        note = f"{tuner.python} lacks {', '.join(missing)}, which its script imports"
        # A script that looks elsewhere for its modules may well find them there.
        verdict: Verdict = "warning" if tuner.sources.extends_path else "failed"
        yield Finding("environment", verdict, note)
    elif not there["accelerate"]:
        note = f"{tuner.python} has no accelerate: the script is run without it"
        yield Finding("environment", "warning", note)
    else:
        yield Finding("environment", "ok", f"{tuner.python} has all that its script imports")
    if not _sees_gpu():
        note = "none is seen here: a training of Wan on a CPU does not end in any useful time"
        yield Finding("GPU", "warning", note)


def _sees_gpu() -> bool:
    """Tell whether a driver of NVIDIA, AMD or WSL is there: asking torch would take seconds."""
    devices = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    return any(Path(device).exists() for device in devices) or bool(shutil.which("nvidia-smi"))


# -- where it goes -----------------------------------------------------------------------------


def _space(order: MusubiOrder, models: Sequence[ModelFile]) -> Finding:
    """Compare free space to the LoRA, and to the LoRAs and states of all epochs that are saved.

    Fails below 200 MB, or where not even the LoRA has room; warns where not all of them have.
    """
    folder = Path(_absolute(order.output))
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    trainer = order.trainer
    lora = max((lora_bytes(x.content, trainer.network_dim) for x in models if x.content), default=0)
    every = trainer.save_every_n_epochs
    saves = 0 if every is None else trainer.max_train_epochs // every
    least = max(_LEAST_SPACE, lora)
    all_of_it = least + saves * (1 + _STATE) * lora
    note = f"{_size(free)} free"
    if free < least:
        return Finding("disk space", "failed", f"{note} in {folder}; {_size(least)} are needed")
    if free < all_of_it:
        note = f"{note} in {folder}; {_size(all_of_it)} for the LoRAs and states of all epochs"
        return Finding("disk space", "warning", note)
    return Finding("disk space", "ok", f"{note}; {_size(all_of_it)} are needed at most")


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB"
