"""Estimate a training's memory and disk from the sizes of Wan's networks, clips and LoRAs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from latentmake.base.machine import Need, duration, human
from latentmake.config.models import Model
from latentmake.config.root import Config, Run
from latentmake.config.trainers import WanTrainer
from latentmake.geometry.buckets import Size
from latentmake.models.files import T5_LENGTH
from latentmake.plan.manifest import result_folder, run_folder
from latentmake.runs.order import Record
from latentmake.trainers.loop.order import STEPS, lora_layers
from latentmake.trainers.wan.dit import IN_BLOCK, LAST, paths_of, read_dit, shapes_of

_CONTEXT = 500_000_000  # bytes of the CUDA context
_IMAGE = 257  # tokens of the CLIP image encoder
_SIDE, _FRAMES = 8, 4  # width in pixels, and frames, of a latent
_FILES = 3  # LoRA files: for diffusers, musubi-tuner and ComfyUI
_NUMBER = 4  # bytes of a trained number
# Parts of the names of weights in float32: the network's `_keep_in_fp32_modules` in diffusers.
_EXACT = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}
# Optimizer -> bytes of its state for a trained number; 8 bytes are two moments in float32.
_STATES = {"adamw": 8, "adamw8bit": 2, "lion": 4, "prodigy": 16, "dadaptation": 16}
# Layers whose inputs are embeddings, not the tokens of the clip.
_TEXT_SIDE = ("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj")
_FEED_FORWARD = ("ffn.net.0.proj", "ffn.net.2")


def estimate_training(config: Config, name: str, model: Model) -> tuple[dict[str, int], Need, str]:
    """Estimate a run's training; its networks must exist and have been checked.

    Returns:
        Part of the memory of one device -> bytes; disk space for the results and the checkpoints;
        memory and disk in words, and the time if the run has been trained before.
    """
    run, folder = config.runs[name], run_folder(name)
    trainer = run.trainer
    assert isinstance(trainer, WanTrainer)
    latent, numbers = largest_latent(config, run), 0
    memory = {"weights": 0, "LoRA": 0, "optimizer": 0, "activations": 0}
    for tensors, dit in map(read_dit, paths_of(model).values()):
        shapes = shapes_of(tensors)
        layers = lora_layers(trainer.target_modules, shapes)
        numbers += lora_numbers(shapes, layers, trainer.rank)
        tokens = T5_LENGTH + (_IMAGE if model.needs_clip else 0)
        taken = training_memory(shapes, dit, layers, latent, trainer, tokens)
        # With two networks, only the one in use is on the device.
        most = {key: max(memory[key], taken[key]) for key in ("weights", "activations")}
        memory = {key: memory[key] + taken[key] for key in memory} | most
    memory["CUDA"] = _CONTEXT
    disk = _disk(trainer, numbers, memory["optimizer"])
    parts = ", ".join(f"{part} {human(size)}" for part, size in memory.items())
    total = human(sum(memory.values()))
    note = f"about {total} of GPU memory ({parts}), {human(disk)} of disk"
    last = Record.read(result_folder(name) / "training.json")
    if last and last.steps:
        pace, steps = last.seconds / last.steps, _steps(trainer)
        time = f"{duration(steps * pace / 60)} at " if steps else ""
        note += f"; {time}{pace:.2g} s a step, as in the last training"
    need = Need(f"results and checkpoints of {name}", str(folder), disk)
    return memory, need, note


def longest_clip(config: Config, run: Run) -> int:
    """Return the number of frames in the longest clips of a run."""
    lengths = [1]
    for dataset in map(config.datasets.__getitem__, run.datasets):
        if dataset.frame_extraction == "full":
            lengths.append((dataset.max_frames - 1) // _FRAMES * _FRAMES + 1)
        else:
            lengths += dataset.target_frames or []
    return max(lengths)


def largest_latent(config: Config, run: Run) -> tuple[int, int, int]:
    """Return frames, height and width of a run's largest latents, from its settings.

    Buckets are ignored: their area is about the area of the resolution.
    """
    sizes = [Size(resolution.width, resolution.height) for resolution in run.resolutions]
    size = max(sizes, key=lambda size: size.width * size.height)
    frames = (longest_clip(config, run) - 1) // _FRAMES + 1
    return frames, size.height // _SIDE, size.width // _SIDE


def lora_numbers(shapes: Mapping[str, Sequence[int]], layers: Iterable[str], rank: int) -> int:
    """Return the number of trained numbers in a LoRA of this rank on these layers."""
    return sum(rank * sum(shapes[f"{layer}.weight"]) for layer in layers)


def training_memory(
    shapes: Mapping[str, Sequence[int]],
    config: Mapping[str, Any],
    layers: Sequence[str],
    latent: tuple[int, int, int],
    trainer: WanTrainer,
    text_tokens: int = T5_LENGTH,
) -> dict[str, int]:
    """Return part -> bytes of the memory that one device needs to train a LoRA.

    For its backward pass, a block keeps a multiple of its width for each token. The multiples were
    measured on networks of Wan's real sizes; a test measures a small one. Memory that the allocator
    cannot use is not included (usually less than a tenth).

    Args:
        shapes: shapes of the network's tensors by name.
        config: configuration of the network.
        layers: names of the layers with a LoRA.
        latent: frames, height and width of the largest latents.
        trainer: settings of the training.
        text_tokens: tokens of text and image embeddings in an example.
    """
    half, rank = trainer.mixed_precision != "no", trainer.rank
    size = 2 if half else 4  # bytes of a frozen number
    trained = lora_numbers(shapes, layers, rank)
    # Multiples of the width: kept for a token in a block, for a text token in a block, for a token
    # outside the blocks, and the minimum that a backward pass needs.
    kept, text, outside, backward = (20, 4, 2, 9) if half else (14, 3, 1, 4)
    out, dim = shapes["proj_out.weight"]  # widths of a token's patch, and of a block
    ffn, blocks, batch = config["ffn_dim"], config["num_layers"], trainer.train_batch_size
    patches = (side // step for side, step in zip(latent, config["patch_size"], strict=True))
    tokens = batch * math.prod(patches)
    first, second = (any(layer.endswith(end) for layer in layers) for end in _FEED_FORWARD)
    in_blocks = (layer for layer in layers if IN_BLOCK.match(layer))
    inside = [layer for layer in in_blocks if not layer.endswith(_TEXT_SIDE)]
    loras = Counter(layer.split(".")[1] for layer in inside)
    wide = (kept + first) * dim + (1 + second) * ffn + rank * max(loras.values(), default=0)
    if trainer.lora_dropout:  # keeps a copy of each input after dropout, and a mask of one byte
        inputs = sum(shapes[f"{layer}.weight"][1] for layer in inside) // blocks
        wide += inputs + inputs // size
    if LAST in layers:
        outside += 1
    block = tokens * wide + batch * text_tokens * text * dim
    held = blocks * tokens * dim + block if trainer.gradient_checkpointing else blocks * block
    # Memory peaks in the backward pass of the feed-forward part. A LoRA on its first layer adds to
    # the peak only if the second layer has none.
    derived = max(backward * dim, 2 * ffn + 2 * dim * (first and not second))
    exact = (math.prod(shape) for name, shape in shapes.items() if _EXACT & {*name.split(".")})
    # Weight and gradient, autocast's copy, and the copy of EMA.
    trained_bytes = 8 + (2 if half else 0) + (0 if trainer.ema_decay is None else 4)
    return {
        "weights": size * sum(map(math.prod, shapes.values())) + (4 - size) * sum(exact),
        "LoRA": trained * trained_bytes,
        "optimizer": trained * _STATES[trainer.optimizer],
        # Prediction and loss of a token take six copies of its patch in float32.
        "activations": size * (held + tokens * (outside * dim + derived)) + tokens * 6 * out * 4,
    }


def _steps(trainer: WanTrainer) -> int | None:
    steps = trainer.steps or (STEPS if trainer.epochs is None else None)
    limits = [limit for limit in (steps, trainer.max_steps) if limit is not None]
    return min(limits, default=None)


def _disk(trainer: WanTrainer, numbers: int, optimizer: int) -> int:
    """Return the bytes of the results, of the copies saved during training, and of checkpoints.

    `numbers` is the number of trained numbers, and `optimizer` the size of the optimizer's state.
    """
    versions = 1 if trainer.ema_decay is None else 2
    checkpoint = numbers * _NUMBER * versions + optimizer
    copies, steps = 1, _steps(trainer)
    if trainer.save_every_n_steps and steps:
        copies += steps // trainer.save_every_n_steps
    if trainer.save_every_n_epochs and trainer.epochs:
        copies += int(trainer.epochs // trainer.save_every_n_epochs)
    # A checkpoint is written before the oldest one is deleted, which takes room for one more.
    return copies * _FILES * _NUMBER * numbers + (trainer.checkpoints_total_limit + 1) * checkpoint
