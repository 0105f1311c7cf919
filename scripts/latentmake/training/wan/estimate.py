"""Estimate of a training of Wan's network, from the sizes of networks, clips and LoRA."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from latentmake.config.models import Model
from latentmake.config.root import Config, Run
from latentmake.config.trainers import WanTrainer
from latentmake.files.workspace import Need, duration, human
from latentmake.geometry.buckets import Size
from latentmake.plan.manifest import result_folder, run_folder
from latentmake.training.order import Record
from latentmake.training.wan.dit import IN_BLOCK, LAST, check_targets, paths_of, read_dit

_CONTEXT = 500_000_000  # bytes that CUDA itself takes
_TEXT = 512  # tokens of a text, padded
_IMAGE = 257  # those of the CLIP image encoder
_SIDE, _FRAMES = 8, 4  # pixels and frames of a latent
_FILES = 3  # of the LoRA: names of diffusers, musubi-tuner and ComfyUI
_EACH = 4  # bytes of a trained number
_STEPS = 1000  # where neither `steps` nor `epochs` is set
# Parts of names of what stays in float32; diffusers' `_keep_in_fp32_modules` of the network.
_EXACT = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}
# Bytes of an optimizer's state for each trained number; 8: two moments in float32.
_STATES = {"adamw": 8, "adamw8bit": 2, "lion": 4, "prodigy": 16, "dadaptation": 16}
_TEXT_SIDE = ("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj")
_FEED_FORWARD = ("ffn.net.0.proj", "ffn.net.2")


class TrainingEstimate(NamedTuple):
    """Memory and disk of a training.

    Attributes:
        memory: parts of what one device must hold -> bytes.
        need: room for its results, and for the checkpoints that are kept.
        note: both in words, and its time where it was trained before.
    """

    memory: dict[str, int]
    need: Need
    note: str


def estimate_training(config: Config, name: str, model: Model) -> TrainingEstimate:
    """Return the estimate of a run whose networks are there and have been checked."""
    run, folder = config.runs[name], run_folder(name)
    trainer = run.trainer
    assert isinstance(trainer, WanTrainer)
    where = f"runs.{name}.trainer.target_modules"
    latent, numbers = largest_latent(config, run), 0
    memory = {"weights": 0, "LoRA": 0, "optimizer": 0, "activations": 0}
    for dit in map(read_dit, paths_of(model).values()):
        layers = check_targets(trainer.target_modules, dit.shapes, where)
        numbers += lora_numbers(dit.shapes, layers, trainer.rank)
        tokens = _TEXT + (_IMAGE if model.needs_clip else 0)
        taken = training_memory(dit.shapes, dit.config, layers, latent, trainer, tokens)
        # Of two networks the one in use needs room.
        most = {key: max(memory[key], taken[key]) for key in ("weights", "activations")}
        memory = {key: memory[key] + taken[key] for key in memory} | most
    memory["CUDA"] = _CONTEXT
    disk = _disk(trainer, numbers, memory["optimizer"])
    parts = ", ".join(f"{part} {human(size)}" for part, size in memory.items())
    total = human(sum(memory.values()))
    note = f"about {total} of GPU memory ({parts}), {human(disk)} of disk"
    if (last := Record.read(result_folder(name) / "training.json")) is not None:
        pace, steps = last.seconds / last.steps, _steps(trainer)
        time = f"{duration(steps * pace / 60)} at " if steps else ""
        note += f"; {time}{pace:.2g} s a step, as in the last training"
    need = Need(f"results and checkpoints of {name}", str(folder), disk)
    return TrainingEstimate(memory, need, note)


def longest_clip(config: Config, run: Run) -> int:
    """Return the frames of the longest clips that a run trains on."""
    lengths = [1]
    for dataset in map(config.datasets.__getitem__, run.datasets):
        if dataset.frame_extraction == "full":
            lengths.append((dataset.max_frames - 1) // _FRAMES * _FRAMES + 1)
        else:
            lengths += dataset.target_frames or []
    return max(lengths)


def largest_latent(config: Config, run: Run) -> tuple[int, int, int]:
    """Return frames, height and width of a run's largest latents, by its settings.

    A bucket has about the area of its resolution.
    """
    size = max((Size(x.width, x.height) for x in run.resolutions), key=lambda x: x.width * x.height)
    frames = (longest_clip(config, run) - 1) // _FRAMES + 1
    return frames, size.height // _SIDE, size.width // _SIDE


def lora_numbers(shapes: Mapping[str, Sequence[int]], layers: Iterable[str], rank: int) -> int:
    """Return how many numbers of a LoRA on some layers are trained."""
    return sum(rank * sum(shapes[f"{layer}.weight"]) for layer in layers)


def training_memory(
    shapes: Mapping[str, Sequence[int]],
    config: Mapping[str, Any],
    layers: Sequence[str],
    latent: tuple[int, int, int],
    trainer: WanTrainer,
    text_tokens: int = _TEXT,
) -> dict[str, int]:
    """Return the bytes that one device needs to train a LoRA on `layers`, part by part.

    What a block keeps of a token for its backward pass is a multiple of the block's width, counted
    on networks of Wan's real sizes; a test counts a small one. `latent` is frames, height and
    width. Memory that the allocator cannot use is not included (usually under a tenth).
    """
    half, rank = trainer.mixed_precision != "no", trainer.rank
    size, trained = 4 - 2 * half, lora_numbers(shapes, layers, rank)
    # Widths kept of a token, a text token, a token outside of blocks; the least of a backward pass.
    kept, text, outside, backward = (20, 4, 2, 9) if half else (14, 3, 1, 4)
    out, dim = shapes["proj_out.weight"]  # of a token's patch, and of a block
    ffn, blocks, batch = config["ffn_dim"], config["num_layers"], trainer.train_batch_size
    patches = (x // step for x, step in zip(latent, config["patch_size"], strict=True))
    tokens = batch * math.prod(patches)
    first, second = (any(x.endswith(end) for x in layers) for end in _FEED_FORWARD)
    inside = [x for x in layers if IN_BLOCK.match(x) and not x.endswith(_TEXT_SIDE)]
    loras = Counter(x.split(".")[1] for x in inside)
    wide = (kept + first) * dim + (1 + second) * ffn + rank * max(loras.values(), default=0)
    if trainer.lora_dropout:  # of each input what is left, and a byte that says whether it is
        inputs = sum(shapes[f"{x}.weight"][1] for x in inside) // blocks
        wide += inputs + inputs // size
    outside += LAST in layers
    block = tokens * wide + batch * text_tokens * text * dim
    held = blocks * tokens * dim + block if trainer.gradient_checkpointing else blocks * block
    # The most is held where the feed-forward part is derived; a LoRA before it alone adds to that.
    derived = max(backward * dim, 2 * ffn + 2 * dim * (first and not second))
    exact = (math.prod(x) for name, x in shapes.items() if _EXACT & {*name.split(".")})
    return {
        "weights": size * sum(map(math.prod, shapes.values())) + (4 - size) * sum(exact),
        # Weight and gradient, autocast's copy, EMA's.
        "LoRA": trained * (8 + 2 * half + 4 * (trainer.ema_decay is not None)),
        "optimizer": trained * _STATES[trainer.optimizer],
        # A token's prediction and loss are six copies of its patch in float32.
        "activations": size * (held + tokens * (outside * dim + derived)) + tokens * 6 * out * 4,
    }


def _steps(trainer: WanTrainer) -> int | None:
    steps = trainer.steps or (_STEPS if trainer.epochs is None else None)
    return min((each for each in (steps, trainer.max_steps) if each is not None), default=None)


def _disk(trainer: WanTrainer, numbers: int, optimizer: int) -> int:
    """Return the bytes of results, of the checkpoints kept, and of copies along the way.

    `numbers` are trained, and `optimizer` is the size of the optimizer's state.
    """
    checkpoint = numbers * _EACH * (1 + (trainer.ema_decay is not None)) + optimizer
    copies, steps = 1, _steps(trainer)
    if trainer.save_every_n_steps and steps:
        copies += steps // trainer.save_every_n_steps
    if trainer.save_every_n_epochs and trainer.epochs:
        copies += int(trainer.epochs // trainer.save_every_n_epochs)
    # A checkpoint is written before the oldest one goes.
    return copies * _FILES * _EACH * numbers + (trainer.checkpoints_total_limit + 1) * checkpoint
