"""Trainings of the first release, whose one digest of settings held the sample pictures' too.

Their records are rewritten as today's, so that nothing is trained or drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from latentmake import cachefile, digest
from latentmake.config import SdTrainer
from latentmake.trainers.order import Prompt, TrainingOrder, Wanted
from latentmake.trainers.pictures import INDEX, read_index
from latentmake.trainers.record import Layout, read_record

__all__ = ["take_over"]

_SAMPLES = (
    *("every", "guidance_scale", "negative_prompt", "num_inference_steps", "prompt_file"),
    *("prompts", "resolution", "seed"),
)
# The keys of the trainer that counted.
_SETTINGS = (
    *("accelerate_config", "adapter", "alpha", "attention", "deterministic", "ema_decay", "epochs"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "kind", "learning_rate"),
    *("lr_min_ratio", "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "mixed_precision"),
    *("noise_offset", "optimizer", "optimizer_arguments", "parts", "prediction_type", "rank"),
    *("reinitialize", "resume_from_checkpoint", "seed", "snr_gamma", "steps", "target_modules"),
    *("torch_compile", "train_batch_size", "weight_decay"),
)


def take_over(order: TrainingOrder, want: Wanted) -> None:
    """Rewrite what a training of the first release left behind, where `want` is what it trained.

    Args:
        order: with all prompts of its sample pictures.
        want: what its weights must have come from.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    layout = Layout(order)
    was = _as_it_was(order, layout)
    old = {"data": want.data, "settings": _settings_digest(was), "weights": want.weights}
    if was.settings_digest() != want.settings:
        return
    for path in layout.samples.glob("step-*.safetensors"):
        _rewrite_row(path, was.picture_keys(), old, want)
    new = {"wanted": want.model_dump()}
    for path in layout.checkpoints.glob("step-*/progress.json"):
        _rewrite(path, old, new)
    _rewrite(layout.samples / INDEX, old, {**new, "pictures": was.pictures_digest()})
    _rewrite(layout.record, old, new)


def _as_it_was(order: TrainingOrder, layout: Layout) -> TrainingOrder:
    """Return the order with the settings that the pictures' index tells, where it fits."""
    record, index = read_record(layout.record), read_index(layout.samples)
    if record is None or index is None or index.wanted != record.wanted:
        return order
    try:
        changes = {
            "trainer": SdTrainer.model_validate(index.settings["trainer"]),
            "sample_size": index.settings["sample_size"],
            "prompts": [Prompt(prompt=prompt, text="") for prompt in index.prompts],
        }
    except (KeyError, ValidationError):
        return order
    return order.model_copy(update=changes)


def _settings_digest(order: TrainingOrder) -> str:
    settings = order.trainer.model_dump(mode="json")
    samples = {key: settings["samples"][key] for key in _SAMPLES}
    texts = {name: each.model_dump() for name, each in order.texts.items()}
    kept = {**{key: settings[key] for key in _SETTINGS}, "samples": samples}
    return digest.of_value([kept, order.sample_size, *([texts] if texts else [])])


def _rewrite(path: Path, old: Mapping[str, str], new: Mapping[str, object]) -> None:
    try:
        values = json.loads(path.read_bytes())
        if values["wanted"] != old:
            return
    except (OSError, ValueError, LookupError, TypeError):
        return
    cachefile.write(path, (json.dumps({**values, **new}, indent=2) + "\n").encode())


def _rewrite_row(path: Path, keys: Sequence[str], old: Mapping[str, str], want: Wanted) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            if json.loads((file.metadata() or {})["wanted"]) != old:
                return
            latents = file.get_tensor("latents")
        drawn = dict(zip(keys, latents, strict=True))
    except (OSError, ValueError, KeyError, SafetensorError):
        return
    data = cachefile.serialize(drawn, {"wanted": want.model_dump_json()})
    cachefile.write(path, data)
