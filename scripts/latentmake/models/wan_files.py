"""Check of a Wan model's files: present, and of the kind that the configuration says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.models.weight_kinds import Content, Kind, content_of, weight_file

DIT: Kind = "Wan DiT"
_CHANNELS = {"i2v": 36, "flf2v": 36, "t2v": 16, "t2i": 16}  # of a DiT's input
_CONTROL_CHANNELS = 48  # Fun-Control's
_WIDTHS = {"14B": 5120, "1.3B": 1536, "A14B": 5120}  # of a DiT's blocks
_ORIGINALS = {
    "dit": "the original release's file, such as wan2.1_t2v_14B_bf16.safetensors",
    "dit_high_noise": "the original release's file",
    "vae": "the original Wan2.1_VAE.pth",
    "text": "the original models_t5_umt5-xxl-enc-bf16.pth",
    "clip": "the original models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
}
_NUMBERED = re.compile(r"\.\d+\.")  # blocks by another name
_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "float32"}


class ModelFile(NamedTuple):
    """One of a model's files.

    Attributes:
        key: its key in the configuration.
        place: its path, or its id on the hub.
        content: None where it cannot be read, or is on the hub.
        fault: why it cannot be used.
        doubt: why it might be unusable.
        known: what it is, where `content` does not say.
    """

    key: str
    place: str
    content: Content | None = None
    fault: str = ""
    doubt: str = ""
    known: str = ""


def model_files(model: Model) -> Iterator[ModelFile]:
    """Yield all files of a Wan model, inspected."""
    yield from networks(model)
    for kind in ("latents", "text"):
        for file in _encoders(model, kind):
            yield _original(file, model.scripted)
    if model.clip is None and model.needs_clip:
        yield ModelFile("clip", "", fault=f"is not set, and {model.task} needs it")


def networks(model: Model) -> Iterator[ModelFile]:
    """Yield the files of a Wan model that are trained, inspected."""
    yield _dit(model, "dit", model.dit)
    if model.dit_high_noise is not None:
        yield _dit(model, "dit_high_noise", model.dit_high_noise)


def encoder_fault(model: Model, kind: str) -> tuple[str, str] | None:
    """Return the fault of the first unusable encoder of `latents` or `text` of a Wan model.

    Returns:
        Its key in the configuration, and the fault of its file; None where all may do, and for
        models whose encoders have a configuration (see `models.checks`).
    """
    if not model.spec.original_files:
        return None
    files = (_original(file, model.scripted) for file in _encoders(model, kind))
    return next(((file.key, f"{file.place}: {file.fault}") for file in files if file.fault), None)


def _encoders(model: Model, kind: str) -> Iterator[ModelFile]:
    if kind == "text":
        yield _encoder("text", model.text[0], "umT5 text encoder")
        return
    yield _encoder("vae", model.vae, "Wan VAE")
    if model.clip is not None:
        yield _encoder("clip", model.clip, "CLIP image encoder")


def _original(file: ModelFile, demanded: bool) -> ModelFile:
    """Return a file with a fault or doubt where musubi-tuner could not read it."""
    library = file.content.converted if file.content else None
    if file.fault or library is None:
        return file
    names, hint = f"is in {library}' names", _ORIGINALS[file.key]
    if demanded:
        return file._replace(fault=f"{names}, which musubi-tuner cannot read: name {hint}")
    return file._replace(
        doubt=f"{names}: its caches are made here, and musubi-tuner's own caching scripts would "
        f"need {hint}"
    )


def _encoder(key: str, weights: Weights, expected: Kind) -> ModelFile:
    if weights.path is None:
        return ModelFile(key, str(weights.hub), doubt="is on the hub, and was not inspected")
    return _inspected(key, weights.path, expected)


def _inspected(key: str, place: str, expected: Kind) -> ModelFile:
    try:
        content = content_of(weight_file(Path(place)))
    except ValueError as error:
        return ModelFile(key, place, fault=str(error))
    except OSError as error:
        return ModelFile(key, place, fault=f"cannot be read ({error.strerror})")
    if content.kind is None:
        return ModelFile(key, place, content, doubt=f"is not known as a {expected}")
    fault = f"is a {content.kind}, not a {expected}" if content.kind != expected else ""
    return ModelFile(key, place, content, fault)


def _dit(model: Model, key: str, place: str | None) -> ModelFile:
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    found = _original(_inspected(key, place, DIT), True)
    if found.fault or found.content is None or model.task is None:
        return found
    if fault := other_task(model.task, found.content):
        return found._replace(fault=fault)
    if weight_file(Path(place)).suffix != ".safetensors":
        return found._replace(doubt="is no .safetensors file, which alone musubi-tuner reads")
    return found


def other_task(task: str, content: Content) -> str | None:
    """Return why a DiT is another task's; None where it fits, or has the sizes of no Wan model."""
    family, _, size = task.removesuffix("-FC").partition("-")
    channels = _CONTROL_CHANNELS if task.endswith("-FC") else _CHANNELS[family]
    for name, tensor in content.tensors.items():
        if not name.endswith("patch_embedding.weight") or len(tensor.shape) != 5:
            continue
        width, inputs = tensor.shape[:2]
        if inputs != channels and inputs in {*_CHANNELS.values(), _CONTROL_CHANNELS}:
            return f"is a Wan DiT of {inputs} input channels; {task} has {channels}"
        if width != _WIDTHS[size] and width in _WIDTHS.values():
            return f"is a Wan DiT of width {width}; {task} has {_WIDTHS[size]}"
    return None


def number_format(content: Content) -> str | None:
    """Return the number format of a DiT's blocks as `mixed_precision` has it; None if unknown.

    The trainer looks at the same tensor.
    """
    for name, tensor in content.tensors.items():
        if name.endswith("blocks.0.cross_attn.k.weight"):
            return _FORMATS.get(tensor.dtype)
    return None


def lora_bytes(content: Content, rank: int) -> int:
    """Return the size of a LoRA of a DiT's blocks in 16 bits, in bytes; 0 if unknown."""
    layers = {
        name: tensor.shape
        for name, tensor in content.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }
    blocks = [shape for name, shape in layers.items() if "blocks." in name]
    numbered = [shape for name, shape in layers.items() if _NUMBERED.search(name)]
    return 2 * sum(rank * sum(shape) for shape in blocks or numbered)
