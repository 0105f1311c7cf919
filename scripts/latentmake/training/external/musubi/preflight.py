"""Checks of a training's model files and settings against musubi-tuner.

Nothing here imports torch or PIL, loads weights or reads tensors: planning runs these checks too.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.errors import TrainingError
from latentmake.files.safetensors import Tensor
from latentmake.models.files import script_of
from latentmake.models.model_files import ModelFile
from latentmake.training.checks import Finding
from latentmake.training.external import checks
from latentmake.training.external.arguments import depends_on_length
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi.caching_command import caching_arguments
from latentmake.training.external.musubi.installation import pick_attention
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.training_command import local_arguments

_LEAST_SPACE = 200_000_000  # bytes
_NUMBERED = re.compile(r"\.\d+\.")  # blocks by another name
_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "float32"}
_STATE = 6  # a state's size in LoRAs: weights and two moments, in 32 bits each


def program_findings(
    order: MusubiOrder, program: Installation, models: Sequence[ModelFile], *, quick: bool
) -> Iterator[Finding]:
    """Check settings against musubi-tuner's sources; see `Launched.program_findings`."""
    if not quick and not _sees_gpu():
        title = order.scripts.title
        note = f"none is seen here: a training of {title} on a CPU does not end in any useful time"
        yield Finding("GPU", "warning", note)
    yield precision(order, models)
    attention = "sdpa"
    try:
        attention = pick_attention(order.trainer.attention, program, among=order.attentions)
        yield Finding("attention", "ok", attention)
    except TrainingError as error:
        yield Finding("attention", "failed", str(error))
    resume = Path("state") if order.trainer.save_every_n_epochs else None
    yield checks.flags(program, local_arguments(order, attention=attention, resume=resume))
    model = order.model
    if model.scripted:
        for kind in ("latents", "text"):
            arguments = caching_arguments(
                model, kind, dataset_config="toml", place=lambda file, _: file.key
            )
            yield checks.flags(program, arguments, script_of(model, kind).name)
    if resume and depends_on_length(order.trainer.arguments):
        note = (
            "the learning rate depends on the number of epochs, which musubi-tuner counts from one "
            "again: a killed training begins anew, unless its states say how far it came"
        )
        yield Finding("resume", "warning", note)
    if not quick:
        yield _space(order, models)


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
    """Return the size of a LoRA of a DiT's blocks in 16 bits, in bytes; 0 if unknown."""
    layers = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }
    blocks = [shape for name, shape in layers.items() if "blocks." in name]
    numbered = [shape for name, shape in layers.items() if _NUMBERED.search(name)]
    return 2 * sum(rank * sum(shape) for shape in blocks or numbered)


def _sees_gpu() -> bool:
    """Whether a driver of NVIDIA, AMD or WSL is there: asking torch would take seconds."""
    devices = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    return any(Path(device).exists() for device in devices) or bool(shutil.which("nvidia-smi"))


def _space(order: MusubiOrder, models: Sequence[ModelFile]) -> Finding:
    """Compare free space to the LoRA, and to the LoRAs and states of all epochs that are saved.

    Fails below 200 MB, or where not even the LoRA has room; warns where not all of them have.
    """
    folder = Path(order.output).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    trainer = order.trainer
    lora = max((lora_bytes(x.tensors, trainer.network_dim) for x in models), default=0)
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
