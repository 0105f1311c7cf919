"""What a Wan training needs besides its caches: model files, musubi-tuner, settings that fit.

Checked while planning, before anything is encoded, and again before the training. Nothing here
imports torch or PIL, loads weights or reads tensors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake.errors import TrainingError
from latentmake.index.remembered import Memory
from latentmake.models.wan_files import ModelFile, model_files, number_format
from latentmake.models.weight_kinds import weight_file
from latentmake.training import checks
from latentmake.training.checks import Finding
from latentmake.training.external.arguments import depends_on_length, located
from latentmake.training.external.musubi.command import (
    LATENTS_SCRIPT,
    TEXT_SCRIPT,
    TRAINING_SCRIPT,
    latents_arguments,
    text_arguments,
    training_arguments,
)
from latentmake.training.external.musubi.installation import Installation, pick_attention
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.result import Layout

__all__ = ["command_arguments", "model_finding", "precision", "preflight"]


def preflight(
    order: MusubiOrder,
    memory: Memory | None = None,
    *,
    quick: bool = False,
    models: Sequence[ModelFile] | None = None,
) -> Iterator[Finding]:
    """Check all that a training needs besides its data, a finding each.

    Args:
        order: the run.
        memory: keeps what is found out about the trainer; None asks anew.
        quick: for planning: no package is imported, no GPU is looked for.
        models: the model's files, where they have been looked at already.
    """
    if models is None:
        models = list(model_files(order.model))
    yield from map(model_finding, models)
    if order.musubi_tuner is None:
        note = "the configuration does not say where it lies: set `musubi_tuner.path`"
        yield Finding("musubi-tuner", "failed", note)
        return
    try:
        tuner = Installation.find(order.musubi_tuner, memory)
        note = tuner.note or str(tuner.script(TRAINING_SCRIPT))
        yield Finding("musubi-tuner", "warning" if tuner.note else "ok", note)
        yield checks.environment(tuner, _optional(order, tuner))
    except TrainingError as error:
        yield Finding("musubi-tuner", "failed", str(error))
        return
    if not quick and not _sees_gpu():
        note = "none is seen here: a training of Wan on a CPU does not end in any useful time"
        yield Finding("GPU", "warning", note)
    yield precision(order, models, tuner)
    attention = "sdpa"
    try:
        attention = pick_attention(order.trainer.attention, tuner, quick=quick)
        yield Finding("attention", "ok", attention)
    except TrainingError as error:
        yield Finding("attention", "failed", str(error))
    resume = Path("state") if order.trainer.save_every_n_epochs else None
    yield checks.flags(tuner, command_arguments(order, attention=attention, resume=resume))
    if order.model.scripted:
        for script, arguments in caching_commands(order):
            yield checks.flags(tuner, arguments, script)
    if resume and depends_on_length(order.trainer.arguments):
        note = (
            "the learning rate depends on the number of epochs, which musubi-tuner counts from one "
            "again: a killed training begins anew, unless its states say how far it came"
        )
        yield Finding("resume", "warning", note)
    yield from checks.paths(order.trainer.arguments, tuner.folder)
    yield from checks.accelerate_config(order.trainer.accelerate_config)


def command_arguments(
    order: MusubiOrder, *, attention: str, resume: Path | None = None
) -> list[str]:
    """Return the arguments of a training on this machine; all its paths are absolute."""
    layout = Layout(order.run, order.output)
    high = order.model.dit_high_noise
    return training_arguments(
        located(order),
        dataset_config=_absolute(layout.dataset_config),
        dit=_network(order.model.dit or ""),
        dit_high_noise=None if high is None else _network(high),
        output_dir=_absolute(layout.work),
        output_name=order.run,
        logging_dir=_absolute(layout.logs) if order.trainer.logging else None,
        attention=attention,
        resume=None if resume is None else _absolute(resume),
    )


def caching_commands(order: MusubiOrder) -> list[tuple[str, list[str]]]:
    """Return the scripts that make the caches of a run, with their flags; the paths stand for any.

    They are those of `encoder: musubi`.
    """
    model = order.model
    clip = None if model.clip is None else "clip"
    return [
        (LATENTS_SCRIPT, latents_arguments(model, vae="vae", clip=clip, dataset_config="toml")),
        (TEXT_SCRIPT, text_arguments(model, t5="t5", dataset_config="toml")),
    ]


def model_finding(file: ModelFile) -> Finding:
    """Return what is to be said of one of the model's files."""
    place = f"{file.place}: " if file.place else ""
    if file.fault:
        return Finding(f"model: {file.key}", "failed", f"{place}{file.fault}")
    if file.doubt:
        return Finding(f"model: {file.key}", "warning", f"{place}{file.doubt}")
    assert file.content is not None
    return Finding(f"model: {file.key}", "ok", f"{file.place}: {file.content.kind}")


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 -- links stay


def _network(place: str) -> str:
    """Return the file that stands for a network: of several, musubi-tuner is given the first."""
    try:
        return _absolute(weight_file(Path(place)))
    except ValueError:
        return _absolute(place)


def _optional(order: MusubiOrder, tuner: Installation) -> set[str]:
    eight_bit = order.trainer.optimizer_type.lower().endswith("8bit")
    return {"bitsandbytes"} if eight_bit and tuner.sources.mentions("bitsandbytes") else set()


def precision(order: MusubiOrder, models: Sequence[ModelFile], tuner: Installation) -> Finding:
    """Check that the trainer's precision is the number format of the DiT's weights."""
    asked = order.trainer.mixed_precision
    for file in models:
        held = number_format(file.content) if file.content and file.key.startswith("dit") else None
        if held in ("bf16", "fp16") and asked not in (held, "no"):
            note = f"{file.key} is in {held}: set `mixed_precision: {held}`, not {asked}"
            demanded = tuner.sources.demands_precision
            return Finding("mixed precision", "failed" if demanded else "warning", note)
    return Finding("mixed precision", "ok", asked)


def _sees_gpu() -> bool:
    """Tell whether a driver of NVIDIA, AMD or WSL is there: asking torch would take seconds."""
    devices = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    return any(Path(device).exists() for device in devices) or bool(shutil.which("nvidia-smi"))
