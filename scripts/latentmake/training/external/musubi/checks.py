"""Checks of the networks that musubi-tuner trains: architecture, task, number format, disk space.

Headers tell a file: no tensor is read. Networks whose names are unknown pass, with a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.config.architectures import MUSUBI, Scripts
from latentmake.config.models import Model
from latentmake.files.safetensors import Tensor, read_head
from latentmake.files.workspace import free, human
from latentmake.models.checks import (
    DIT,
    ModelFile,
    encoders,
    in_original_names,
    other_task,
    tensors_at,
)
from latentmake.models.headers import LORA, kinds_of, one, weight_file
from latentmake.training.backend import Finding, Verdict
from latentmake.training.external.musubi.order import MusubiOrder

_LEAST_SPACE = 200_000_000  # bytes
_BLOCK = re.compile(r"\.\d+\..*\.weight$")
_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "float32"}
_STATE = 6  # a state's size in LoRAs: weights and two moments, in 32 bits each


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


def number_format(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the number format of a Wan DiT's blocks as `mixed_precision` has it, if it is known.

    The trainer looks at the same tensor.
    """
    ending = "blocks.0.cross_attn.k.weight"
    return next((_FORMATS.get(x.dtype) for n, x in tensors.items() if n.endswith(ending)), None)


def lora_bytes(tensors: Mapping[str, Tensor], rank: int) -> int:
    """Return the most that a LoRA of a DiT's blocks takes in 16 bits, in bytes; 0 if unknown."""
    layers = (x.shape for name, x in tensors.items() if _BLOCK.search(name))
    return 2 * sum(rank * sum(shape) for shape in layers if len(shape) == 2)


def space(order: MusubiOrder, models: Sequence[ModelFile]) -> Finding:
    """Compare free space to the LoRA, and to the LoRAs and states of all epochs that are saved.

    Fails below 200 MB, or where not even the LoRA has room; warns where not all of them have.
    """
    there, trainer = free(order.output), order.trainer
    lora = max(
        (lora_bytes(x.tensors, trainer.network_dim) for x in models if x.key.startswith("dit")),
        default=0,
    )
    every = trainer.save_every_n_epochs
    saves = 0 if every is None else trainer.max_train_epochs // every
    least = max(_LEAST_SPACE, lora)
    most = least + saves * (1 + _STATE) * lora
    verdict: Verdict = "failed" if there < least else "warning" if there < most else "ok"
    note = f"{human(there)} free; {human(most)} are needed at most"
    return Finding("disk space", verdict, note)


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
    """Return a network that is trained, inspected."""
    scripts, wan = model.spec.scripts, model.spec.encodes
    assert scripts is not None
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    title = f"{scripts.title} DiT"
    found = ModelFile(key, place, known=title)
    try:
        tensors = tensors_at(Path(place))
    except ValueError as error:
        return found._replace(fault=str(error))
    found, kinds = found._replace(tensors=tensors), kinds_of(tensors)
    if LORA in kinds or (wan and kinds and kinds.get("DiT") != DIT):
        return found._replace(fault=f"is {one(next(iter(kinds.values())))}, not a {title}")
    if wan and kinds:
        return _wan_network(model, in_original_names(found, DIT, demanded=True))
    if _has(tensors, scripts):
        return found._replace(fault=_stamp_fault(Path(place), scripts))
    for other in MUSUBI.values():
        if _has(tensors, other):
            return found._replace(fault=f"is a {other.title} DiT, not a {title}")
    return found._replace(doubt=f"is not known as a {title}")


def _has(tensors: Mapping[str, Tensor], scripts: Scripts) -> bool:
    return any(re.search(scripts.mark, name) for name in tensors)


def _stamp_fault(path: Path, scripts: Scripts) -> str:
    """Return why a DiT's header is not what its training script demands; "" where it is."""
    if scripts.stamp is None:
        return ""
    key, expected = scripts.stamp
    try:
        given = read_head(weight_file(path)).metadata.get(key)
    except (OSError, ValueError):
        return "is no .safetensors file, which its training script demands"
    if given == expected:
        return ""
    said = f"`{given}`" if given else "none"
    return f"has {said} as `{key}` in its header, where `{expected}` is demanded"


def _wan_network(model: Model, file: ModelFile) -> ModelFile:
    if file.fault or model.task is None:
        return file
    if fault := other_task(model.task, file.tensors):
        return file._replace(fault=fault)
    if weight_file(Path(file.place)).suffix != ".safetensors":
        return file._replace(doubt="is no .safetensors file, which alone musubi-tuner reads")
    return file
