"""Checks of the networks that musubi-tuner trains: architecture, task, dtype.

They read only the headers of the files. A network with unknown tensor names passes with a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.config.architectures import MUSUBI
from latentmake.config.makers import Scripts
from latentmake.config.models import Model
from latentmake.formats.safetensors import Tensor
from latentmake.models.headers import LORA, kinds_of, one, weight_file
from latentmake.models.inspection import (
    DIT,
    ModelFile,
    encoders,
    in_original_names,
    other_task,
    tensors_at,
)
from latentmake.runs.findings import Finding
from latentmake.trainers.musubi.order import MusubiOrder

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "float32"}


def precision(order: MusubiOrder, models: Sequence[ModelFile]) -> Finding:
    """Check that the trainer's `mixed_precision` fits the dtype of the DiT's weights.

    musubi-tuner asserts this, but only after it has loaded the weights.
    """
    setting = order.trainer.mixed_precision
    for file in models:
        stored = number_format(file.tensors) if file.key.startswith("dit") else None
        if stored in ("bf16", "fp16") and setting not in (stored, "no"):
            note = f"{file.key} is in {stored}: set `mixed_precision: {stored}`, not {setting}"
            return Finding("mixed precision", "failed", note)
    return Finding("mixed precision", "ok", setting)


def unreadable(order: MusubiOrder) -> dict[str, str]:
    """Return key of the configuration -> fault of weights that musubi-tuner cannot read."""
    model, faults = order.model, {}
    for file in (*order.scripts.latents.files, *order.scripts.text.files):
        weights, key = model.weights(file.key), file.key.partition(".")[0]
        if weights is None:
            continue
        if weights.path is None or (model.spec.encodes and Path(weights.path).is_dir()):
            fault = f"want a file of the original weights, not {weights.path or weights.hub}"
            faults[f"models.{order.model_name}.{key}"] = fault
    return faults


def samples(order: MusubiOrder) -> Iterator[Finding]:
    """Check that musubi-tuner can load the encoders with which it generates samples."""
    faults = unreadable(order) if order.trainer.samples.prompts else {}
    for where, fault in faults.items():
        yield Finding("samples", "failed", f"musubi-tuner's samples {fault}: correct {where}")


def number_format(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the dtype of a Wan DiT as a value of `mixed_precision`; None if unknown.

    It is the dtype of the tensor that the trainer looks at, too.
    """
    ending = "blocks.0.cross_attn.k.weight"
    dtypes = (tensor.dtype for name, tensor in tensors.items() if name.endswith(ending))
    return next(map(_FORMATS.get, dtypes), None)


def model_files(model: Model) -> Iterator[ModelFile]:
    """Yield all files of a model after their inspection."""
    yield from networks(model)
    named = {file.key: file for kind in ("latents", "text") for file in encoders(model, kind)}
    yield from (file for key, file in named.items() if key != "dit")


def networks(model: Model) -> Iterator[ModelFile]:
    """Yield the files of the networks that are trained, after their inspection."""
    yield _network(model, "dit", model.dit)
    if model.dit_high_noise is not None:
        yield _network(model, "dit_high_noise", model.dit_high_noise)


def _network(model: Model, key: str, place: str | None) -> ModelFile:
    scripts, wan = model.spec.scripts, model.spec.encodes
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    title = f"{scripts.title} DiT"
    file = ModelFile(key, place, description=title)
    try:
        tensors = tensors_at(Path(place))
    except ValueError as error:
        return file._replace(fault=str(error))
    file, kinds = file._replace(tensors=tensors), kinds_of(tensors)
    if LORA in kinds or (wan and kinds and kinds.get("DiT") != DIT):
        return file._replace(fault=f"is {one(next(iter(kinds.values())))}, not a {title}")
    if wan and kinds:
        file = in_original_names(file, DIT)
        if fault := file.fault or other_task(model, file.tensors):
            return file._replace(fault=fault)
        if weight_file(Path(place)).suffix != ".safetensors":
            return file._replace(doubt="is no .safetensors file, which alone musubi-tuner reads")
        return file
    if _has(tensors, scripts):
        return file
    for other in MUSUBI.values():
        if _has(tensors, other):
            return file._replace(fault=f"is a {other.title} DiT, not a {title}")
    return file._replace(doubt=f"is not known as a {title}")


def _has(tensors: Mapping[str, Tensor], scripts: Scripts) -> bool:
    return any(re.search(scripts.mark, name) for name in tensors)
