"""Checks of the networks that musubi-tuner trains: architecture, task, number format.

Headers tell a file: no tensor is read. Networks whose names are unknown pass, with a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.config.architectures import MUSUBI, Scripts
from latentmake.config.models import Model
from latentmake.files.safetensors import Tensor
from latentmake.models.checks import (
    DIT,
    ModelFile,
    encoders,
    in_original_names,
    other_task,
    tensors_at,
)
from latentmake.models.headers import LORA, kinds_of, one, weight_file
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.findings import Finding

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "float32"}


def precision(order: MusubiOrder, models: Sequence[ModelFile]) -> Finding:
    """Check that the trainer's precision is the number format of the DiT's weights.

    musubi-tuner asserts it once it has loaded the weights.
    """
    asked = order.trainer.mixed_precision
    for file in models:
        held = number_format(file.tensors) if file.key.startswith("dit") else None
        if held in ("bf16", "fp16") and asked not in (held, "no"):
            note = f"{file.key} is in {held}: set `mixed_precision: {held}`, not {asked}"
            return Finding("mixed precision", "failed", note)
    return Finding("mixed precision", "ok", asked)


def unreadable(order: MusubiOrder) -> dict[str, str]:
    """Return the model's keys whose weights only our encoders read, with what is wrong."""
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
    """Check that musubi-tuner can load the encoders by which it draws samples."""
    faults = unreadable(order) if order.trainer.samples.prompts else {}
    for where, fault in faults.items():
        yield Finding("samples", "failed", f"musubi-tuner's samples {fault}: correct {where}")


def number_format(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the number format of a Wan DiT's blocks as `mixed_precision` has it, if it is known.

    The trainer looks at the same tensor.
    """
    ending = "blocks.0.cross_attn.k.weight"
    return next((_FORMATS.get(x.dtype) for n, x in tensors.items() if n.endswith(ending)), None)


def model_files(model: Model) -> Iterator[ModelFile]:
    """Yield all files of a model, inspected."""
    yield from networks(model)
    named = {file.key: file for kind in ("latents", "text") for file in encoders(model, kind)}
    yield from (file for key, file in named.items() if key != "dit")


def networks(model: Model) -> Iterator[ModelFile]:
    """Yield the files of a model that are trained, inspected."""
    yield _network(model, "dit", model.dit)
    if model.dit_high_noise is not None:
        yield _network(model, "dit_high_noise", model.dit_high_noise)


def _network(model: Model, key: str, place: str | None) -> ModelFile:
    scripts, wan = model.spec.scripts, model.spec.encodes
    assert scripts is not None
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    title = f"{scripts.title} DiT"
    found = ModelFile(key, place, description=title)
    try:
        tensors = tensors_at(Path(place))
    except ValueError as error:
        return found._replace(fault=str(error))
    found, kinds = found._replace(tensors=tensors), kinds_of(tensors)
    if LORA in kinds or (wan and kinds and kinds.get("DiT") != DIT):
        return found._replace(fault=f"is {one(next(iter(kinds.values())))}, not a {title}")
    if wan and kinds:
        return _wan_network(model, in_original_names(found, DIT))
    if _has(tensors, scripts):
        return found
    for other in MUSUBI.values():
        if _has(tensors, other):
            return found._replace(fault=f"is a {other.title} DiT, not a {title}")
    return found._replace(doubt=f"is not known as a {title}")


def _has(tensors: Mapping[str, Tensor], scripts: Scripts) -> bool:
    return any(re.search(scripts.mark, name) for name in tensors)


def _wan_network(model: Model, file: ModelFile) -> ModelFile:
    if file.fault or model.task is None:
        return file
    if fault := other_task(model.task, file.tensors):
        return file._replace(fault=fault)
    if weight_file(Path(file.place)).suffix != ".safetensors":
        return file._replace(doubt="is no .safetensors file, which alone musubi-tuner reads")
    return file
