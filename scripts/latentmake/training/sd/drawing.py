"""Sample pictures drawn after a training, from the weights that are still there.

A new prompt or setting of the pictures needs no step of training: the network as it began, the
copies along the way, the checkpoints and the trained weights draw it. Steps whose weights are gone
keep the pictures that they have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from latentmake.training.order import TrainingOrder, Wanted
from latentmake.training.result import COPIED, Record, RunFiles, sample_steps
from latentmake.training.sd import checkpoint, network
from latentmake.training.sd.accelerator import DTYPES, make_accelerator
from latentmake.training.sd.data.caches import read_items
from latentmake.training.sd.data.headers import HIDDEN_STATE, LATENTS, inspect
from latentmake.training.sd.learner import make_denoiser
from latentmake.training.sd.objective import load_noise_schedule
from latentmake.training.sd.sampling import Drawn, make_sampler, read_rows, write_row

__all__ = ["draw_missing"]

_Source = Path | checkpoint.Checkpoint | None
"""Weights of a step: a folder, a checkpoint, or None for those the training began with."""


def draw_missing(order: TrainingOrder, want: Wanted) -> dict[int, Drawn]:
    """Draw the sample pictures that a finished training lacks, as far as its weights are there.

    Each step's pictures are written as soon as they are drawn.

    Returns:
        The steps that have one of the pictures asked for, ascending, and their pictures.
    """
    files = RunFiles(order)
    record = Record.read(files.record)
    rows = read_rows(files.samples, want)
    keys = set(order.picture_keys())
    if record is not None and record.wanted == want:
        asked = sample_steps(order, record.steps)
        weights = _weights(order, want, record.steps)
        missing = {
            step: rows.get(step, {})
            for step in sorted(asked & weights.keys())
            if not keys <= rows.get(step, {}).keys()
        }
        if missing:
            rows |= _draw(order, want, missing, weights)
        rows = {step: rows[step] for step in sorted(asked & rows.keys())}
    return {step: drawn for step, drawn in rows.items() if keys & drawn.keys()}


def _weights(order: TrainingOrder, want: Wanted, steps: int) -> dict[int, _Source]:
    """Return the steps whose weights are there, and where."""
    files = RunFiles(order)
    found: dict[int, _Source] = {}
    if order.trainer.resume_from_checkpoint is None:
        found[0] = None
    for each in checkpoint.find(files.checkpoints, want):
        found[each.progress.step] = each
    for folder in files.saved.glob("step-*"):
        step = folder.name.removeprefix("step-")
        if step.isdecimal() and Wanted.read(folder / COPIED) == want:
            found[int(step)] = folder
    return {**found, steps: files.output}


def _draw(
    order: TrainingOrder,
    want: Wanted,
    missing: Mapping[int, Drawn],
    weights: Mapping[int, _Source],
) -> dict[int, Drawn]:
    """Draw and write the pictures of some steps, and return them with those that were there."""
    settings, samples = order.trainer, RunFiles(order).samples
    first = read_items(Path(order.manifest))[0]
    latents = inspect(min(first.latents.items())[1], LATENTS)
    text_width = inspect(first.text, HIDDEN_STATE).shape[1]
    schedule = load_noise_schedule(order.scheduler, settings.prediction_type, order.unet)
    sampler = make_sampler(order, schedule, latents)
    accelerator = make_accelerator(settings)
    device, dtype = accelerator.device, DTYPES[settings.mixed_precision]
    denoiser = make_denoiser(
        order, channels=latents.shape[0], text_width=text_width, dtype=dtype
    ).to(device)
    denoiser.eval()
    drawn: dict[int, Drawn] = {}
    for step, there in missing.items():  # ascending: the network is as it began for step 0
        if not _put(denoiser, weights[step]):
            continue
        with torch.no_grad(), accelerator.autocast():
            new = sampler.draw(denoiser, device=device, dtype=dtype, without=there)
        drawn[step] = {**there, **new}
        write_row(samples, step, drawn[step], want)
        sys.stderr.write(f"{order.run}: {len(new)} sample pictures of step {step} drawn\n")
    return drawn


def _put(denoiser: network.Denoiser, source: _Source) -> bool:
    """Give a network the weights of a step; tell whether they are complete."""
    if isinstance(source, Path):
        network.read_copy(denoiser, source)
    elif source is not None:
        loaded = checkpoint.load(source)
        if loaded is None:
            return False
        state, rest = loaded
        network.load_trained(denoiser, state)
        if rest["average"] is not None:
            parameters = [each for each in denoiser.parameters() if each.requires_grad]
            with torch.no_grad():
                for each, mean in zip(parameters, rest["average"]["shadow_params"], strict=True):
                    each.copy_(mean)
    return True
