"""Estimate of a training of Wan's network, from the sizes of networks, clips and LoRA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.config.trainers import WanTrainer
from latentmake.files.disk import Need, human
from latentmake.geometry.buckets import Size
from latentmake.models.wan_dit import Dit, check_targets, read_dit
from latentmake.models.wan_memory import TrainingMemory, lora_parameters, training_memory
from latentmake.plan.lock import run_folder
from latentmake.progress import duration

_CONTEXT = 500_000_000  # bytes that CUDA itself takes
_TEXT = 512  # tokens of a text, padded
_IMAGE = 257  # those of the CLIP image encoder
_SIDE, _FRAMES = 8, 4  # pixels and frames of a latent
_FILES = 3  # of the LoRA: names of diffusers, musubi-tuner and ComfyUI
_EACH = 4  # bytes of a trained number
_STEPS = 1000  # where neither `steps` nor `epochs` is set


class TrainingEstimate(NamedTuple):
    """Memory, disk and time of a training.

    Attributes:
        memory: parts of what one device must hold -> bytes, the largest first in importance.
        disk: bytes of its results, and of the checkpoints that are kept, in `folder`.
        steps: of the optimizer; None where the number of items decides.
        seconds: a step, in the run's last training; None where there was none.
    """

    run: str
    memory: dict[str, int]
    disk: int
    folder: str
    steps: int | None = None
    seconds: float | None = None

    @property
    def need(self) -> Need:
        """Room for results and checkpoints."""
        return Need(f"results and checkpoints of {self.run}", self.folder, self.disk)

    @property
    def note(self) -> str:
        """The estimate in words: memory, disk, and time where it is known."""
        parts = ", ".join(f"{name} {human(size)}" for name, size in self.memory.items())
        memory = f"about {human(sum(self.memory.values()))} of GPU memory ({parts})"
        words = [f"{memory}, {human(self.disk)} of disk"]
        if self.seconds is not None:
            time = f"{duration(self.steps * self.seconds / 60)} at " if self.steps else ""
            words.append(f"{time}{self.seconds:.2g} s a step, as in the last training")
        return "; ".join(words)


def estimate_training(config: Config, name: str, model: Model) -> TrainingEstimate:
    """Return the estimate of a run whose networks are there and have been checked."""
    run = config.runs[name]
    trainer = run.trainer
    assert isinstance(trainer, WanTrainer)
    dits = list(_networks(model))
    where = f"runs.{name}.trainer.target_modules"
    found = [_memory(dit, trainer, largest_latent(config, run), model, where) for dit in dits]
    numbers = sum(_lora(dit, trainer, where) for dit in dits)
    memory = {
        "weights": sum(each.weights for each in found),
        "LoRA": sum(each.lora for each in found),
        "optimizer": sum(each.optimizer for each in found),
        "activations": max(each.activations for each in found),
        "CUDA": _CONTEXT,
    }
    folder = run_folder(name)
    return TrainingEstimate(
        run=name,
        memory=memory,
        disk=_disk(trainer, numbers, memory["optimizer"]),
        folder=str(folder),
        steps=_steps(trainer),
        seconds=_seconds_a_step(folder),
    )


def largest_latent(config: Config, run: Run) -> tuple[int, int, int]:
    """Return frames, height and width of a run's largest latents, by its settings.

    A bucket has about the area of its resolution.
    """
    size = max((Size(x.width, x.height) for x in run.resolutions), key=lambda x: x.width * x.height)
    frames = 1
    for dataset in map(config.datasets.__getitem__, run.datasets):
        lengths = [1, *(dataset.target_frames or [])]
        if dataset.video and dataset.frame_extraction == "full":
            lengths = [dataset.max_frames]
        frames = max(frames, *lengths)
    return (frames - 1) // _FRAMES + 1, size.height // _SIDE, size.width // _SIDE


def _networks(model: Model) -> Iterator[Dit]:
    if model.dit is not None:
        yield read_dit(model.dit)
    if model.dit_high_noise is not None:
        yield read_dit(model.dit_high_noise)


def _memory(
    dit: Dit, trainer: WanTrainer, latent: tuple[int, int, int], model: Model, where: str
) -> TrainingMemory:
    return training_memory(
        dit.shapes,
        latent=latent,
        layers=_layers(dit, trainer, where),
        rank=trainer.rank,
        batch=trainer.train_batch_size,
        text_tokens=_text_tokens(model),
        half=trainer.mixed_precision != "no",
        gradient_checkpointing=trainer.gradient_checkpointing,
        optimizer=trainer.optimizer,
        ema=trainer.ema_decay is not None,
    )


def _text_tokens(model: Model) -> int:
    return _TEXT + (_IMAGE if model.needs_clip else 0)


def _layers(dit: Dit, trainer: WanTrainer, where: str) -> list[str]:
    return check_targets(trainer.target_modules, dit.shapes.tensors(), where)


def _lora(dit: Dit, trainer: WanTrainer, where: str) -> int:
    return lora_parameters(dit.shapes, _layers(dit, trainer, where), trainer.rank)


def _steps(trainer: WanTrainer) -> int | None:
    steps = trainer.steps or (_STEPS if trainer.epochs is None else None)
    return min((each for each in (steps, trainer.max_steps) if each is not None), default=None)


def _disk(trainer: WanTrainer, numbers: int, optimizer: int) -> int:
    """Return the bytes of results, of the checkpoints kept, and of copies along the way.

    `numbers` are trained, and `optimizer` is the size of the optimizer's state.
    """
    ema = _EACH if trainer.ema_decay is not None else 0
    checkpoint = numbers * (_EACH + ema) + optimizer
    copies, steps = 1, _steps(trainer)
    if trainer.save_every_n_steps and steps:
        copies += steps // trainer.save_every_n_steps
    if trainer.save_every_n_epochs and trainer.epochs:
        copies += int(trainer.epochs // trainer.save_every_n_epochs)
    # A checkpoint is written before the oldest one goes.
    return copies * _FILES * _EACH * numbers + (trainer.checkpoints_total_limit + 1) * checkpoint


def _seconds_a_step(folder: Path) -> float | None:
    """Return the mean time of a step in the run's last training; None where there was none."""
    places = [
        *sorted(folder.glob("checkpoints/step-*/progress.json"))[-1:],
        folder / "training.json",
    ]
    for path in places:
        try:
            record = json.loads(path.read_bytes())
            steps = record.get("step") or record["steps"]
            return float(record["seconds"]) / steps if steps else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return None
