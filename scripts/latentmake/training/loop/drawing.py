"""Sample pictures drawn after a training, from the weights that are still there.

A new prompt or setting of the pictures needs no step of training: the network as it began, the
copies along the way, the checkpoints and the trained weights draw it. Steps whose weights are gone
keep the pictures that they have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from latentmake.training.loop import checkpoint
from latentmake.training.loop.accelerator import DTYPES, make_accelerator
from latentmake.training.loop.curves import draw_curves
from latentmake.training.loop.data.caches import read_items
from latentmake.training.loop.data.headers import inspect
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.loop.recipe import Network, Recipe
from latentmake.training.loop.result import COPIED, Record, RunFiles, sample_steps, wanted
from latentmake.training.loop.sample_images import CURVES, write_pictures
from latentmake.training.loop.sample_rows import Drawn, read_rows, write_row
from latentmake.training.loop.weights import load_trained
from latentmake.training.order import Wanted

Show = Callable[[Mapping[int, Drawn]], Mapping[int, list[bytes | None]]]
"""Decodes the samples of each step, and returns a file's content for each prompt."""

_Source = Path | checkpoint.Checkpoint | None
"""Weights of a step: a folder, a checkpoint, or None for those the training began with."""


def draw_missing(recipe: Recipe, want: Wanted) -> dict[int, Drawn]:
    """Draw the sample pictures that a finished training lacks, as far as its weights are there.

    Each step's pictures are written as soon as they are drawn.

    Returns:
        The steps that have one of the pictures asked for, ascending, and their pictures.
    """
    order = recipe.order
    files = RunFiles(order)
    record = Record.read(files.record)
    rows = read_rows(files.samples, want)
    keys = set(order.picture_keys())
    if record is not None and record.wanted == want:
        # A longer training keeps the pictures of the one that it went on from.
        ends = (*record.continued, record.steps)
        asked = frozenset(step for end in ends for step in sample_steps(order, end))
        weights = _weights(order, want, record.steps)
        missing = {
            step: rows.get(step, {})
            for step in sorted(asked & weights.keys())
            if not keys <= rows.get(step, {}).keys()
        }
        if missing:
            rows |= _draw(recipe, want, missing, weights)
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
    recipe: Recipe,
    want: Wanted,
    missing: Mapping[int, Drawn],
    weights: Mapping[int, _Source],
) -> dict[int, Drawn]:
    """Draw and write the pictures of some steps, and return them with those that were there."""
    order = recipe.order
    settings, samples = order.trainer, RunFiles(order).samples
    latents_file, text_file = next(read_items(Path(order.manifest))[0].pairs())
    latents = inspect(latents_file, recipe.tensors.latents)
    text_width = inspect(text_file, recipe.tensors.text).shape[1]
    sampler = recipe.make_sampler(recipe.make_objective(), latents)
    accelerator = make_accelerator(settings, order.kind)
    device, dtype = accelerator.device, DTYPES[settings.mixed_precision]
    denoiser = recipe.make_network(
        channels=latents.shape[0], text_width=text_width, dtype=dtype
    ).to(device)
    denoiser.eval()
    drawn: dict[int, Drawn] = {}
    for step, there in missing.items():  # ascending: the network is as it began for step 0
        if not _put(recipe, denoiser, weights[step]):
            continue
        with torch.no_grad(), accelerator.autocast():
            new = sampler.draw(denoiser, device=device, dtype=dtype, without=there)
        drawn[step] = {**there, **new}
        write_row(samples, step, drawn[step], want)
        sys.stderr.write(f"{order.run}: {len(new)} sample pictures of step {step} drawn\n")
    return drawn


def _put(recipe: Recipe, denoiser: Network, source: _Source) -> bool:
    """Give a network the weights of a step; tell whether they are complete."""
    if isinstance(source, Path):
        recipe.read_copy(denoiser, source)
    elif source is not None:
        loaded = checkpoint.load(source)
        if loaded is None:
            return False
        state, rest = loaded
        load_trained(denoiser, state)
        if rest["average"] is not None:
            parameters = [each for each in denoiser.parameters() if each.requires_grad]
            with torch.no_grad():
                for each, mean in zip(parameters, rest["average"]["shadow_params"], strict=True):
                    each.copy_(mean)
    return True


def write_samples(recipe: Recipe, show: Show) -> None:
    """Draw and decode the samples of a finished training, write them, draw its curves.

    No step is trained, and no file of weights is written.
    """
    order = recipe.order
    files, want = RunFiles(order), wanted(order)
    curves = draw_curves(files.scalars, files.output / CURVES, title=order.run)
    rows = draw_missing(recipe, want) if order.picture_keys() else {}
    write_pictures(files.samples, order, want, show(rows), curves=curves)
