"""Evaluation of Wan's network with and without its LoRA on items that did not train.

Losses and clips that are missing are made first with the network as the training began, then with
the trained LoRA. Noise and timesteps of the losses are fixed by the keys of the items.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake import digest
from latentmake.caches.encoders.device import pick_device
from latentmake.errors import CacheError, TrainingError
from latentmake.files import cachefile
from latentmake.plan.manifest import Row
from latentmake.progress import Progress
from latentmake.training.loop.caches import HINT, Caches, find_not_finite, read_items
from latentmake.training.loop.checkpoint import as_begun
from latentmake.training.loop.order import wanted
from latentmake.training.loop.recipe import DTYPES, decided, generator
from latentmake.training.order import JsonFile, caption_in, lock_content, read_order
from latentmake.training.wan.dit import WanOrder
from latentmake.training.wan.evaluation import (
    CLIP_NAME,
    KINDS,
    METRICS,
    TIMESTEPS,
    VERSION,
    Clip,
    EvaluationOrder,
    Figures,
    Kind,
    Losses,
    Metrics,
    Result,
    result_reasons,
    settings_of,
    training_digest,
)
from latentmake.training.wan.generate import Painter
from latentmake.training.wan.generation import adapter_digest
from latentmake.training.wan.network import Denoiser
from latentmake.training.wan.recipe import (
    CLIP,
    FIRST_FRAME,
    Condition,
    Objective,
    WanRecipe,
    noise_of,
)

_MADE: tuple[Literal["base", "adapter"], ...] = ("base", "adapter")
_KNOWN = ".parts.json"
_WORDS = 40  # characters of an item's name in that of a file
_LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709, of the values as they are stored


class Case(NamedTuple):
    """One held-out item at one resolution, of a video its first clip.

    Attributes:
        number: of its example in the caches.
        size: frames, height and width of its clip.
        latents: path of the cache file, with its key; `text` likewise.
    """

    number: int
    item: Row
    resolution: str
    size: tuple[int, int, int]
    latents: str
    text: str
    latents_key: str
    text_key: str

    @property
    def name(self) -> str:
        """Dataset, stem and resolution."""
        return f"{self.item.dataset}/{self.item.stem} {self.resolution}"


def cases_of(recipe: WanRecipe) -> tuple[list[Case], Caches]:
    """Return the held-out items of a run and their caches.

    Raises:
        UserError: the manifest or a cache file is damaged.
    """
    rows = [
        row.model_copy(update={"latents": {size: row.latents_at(size)[:1] for size in row.latents}})
        for row in read_items(Path(recipe.order.manifest), held_out=True)
    ]
    caches = Caches(rows, recipe.tensors)
    found: list[Case] = []
    for row, name, example in zip(caches.rows, caches.resolutions, caches.examples, strict=False):
        pair = example.latents.path, example.text.path
        keys = [cachefile.read_header(path).key for path in pair]
        _, frames, height, width = example.shape
        size = 4 * frames - 3, 8 * height, 8 * width
        found.append(Case(len(found), row, name, size, *pair, *keys))
    return found, caches


# -- losses ---------------------------------------------------------------------------------------


def timesteps_of(objective: Objective) -> torch.Tensor:
    """Return the timesteps [10] of an evaluation: in the middle of ten equal shares."""
    return objective.at((torch.arange(TIMESTEPS) + 0.5) / TIMESTEPS)


@torch.no_grad()
def losses_of(
    objective: Objective,
    network: Denoiser,
    caches: Caches,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[float]:
    """Yield an item's loss at each of `timesteps_of`.

    The noise follows from the key of its latents and the number of the timestep: it is the same for
    every network, and for whatever else is held out.

    Raises:
        CacheError: a cache file holds NaN or infinite values.
        TrainingError: the network's prediction is NaN or infinite.
    """
    batch = caches.batch([case.number])
    for number, timestep in enumerate(timesteps_of(objective)):
        random = generator("evaluation", case.latents_key, number)
        noise = torch.randn(batch.latents.shape, generator=random)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            found = objective.losses(
                network, batch, noise, timestep[None], device=device, dtype=dtype
            )
        loss = float(found.raw)
        if not math.isfinite(loss):
            if damaged := find_not_finite(caches, [case.number]):
                what = "holds values that are NaN or infinite"
                raise CacheError(what, where=damaged[0], hint=HINT)
            hint = "look at the training's loss, and at the weights of the network"
            raise TrainingError("the loss is NaN or infinite", where=case.name, hint=hint)
        yield loss


# -- figures --------------------------------------------------------------------------------------


def figures_of(frames: NDArray[np.uint8]) -> Figures:
    """Return the figures of a clip [F, H, W, 3], in levels from 0 to 255.

    They are means over all pixels: of the difference between a frame and the next
    (`temporal_difference`) and between the first and the last (`first_to_last`), both None of one
    frame; of the BT.709 luma (`brightness`, with its standard deviation); of each channel; and of
    the standard deviation of a pixel's red, green and blue (`colour_deviation`).
    """
    means = []
    for frame in frames:
        luma = frame @ np.array(_LUMA)
        means.append(
            [luma.mean(), (luma**2).mean(), frame.std(axis=2).mean(), *frame.mean(axis=(0, 1))]
        )
    brightness, square, colour, red, green, blue = np.mean(means, axis=0).tolist()
    pairs = [*pairwise(frames), (frames[0], frames[-1])]
    moved = [float(np.abs(now.astype(float) - last).mean()) for last, now in pairs]
    several = len(frames) > 1
    return {
        "temporal_difference": sum(moved[:-1]) / len(moved[:-1]) if several else None,
        "first_to_last": moved[-1] if several else None,
        "brightness": brightness,
        "brightness_deviation": max(0.0, square - brightness**2) ** 0.5,
        "red": red,
        "green": green,
        "blue": blue,
        "colour_deviation": colour,
    }


def mean_of(clips: Sequence[Figures]) -> Figures:
    """Return the mean of each figure over some clips; None where no clip has it."""
    means: Figures = {}
    for name in clips[0] if clips else ():
        values = [value for clip in clips if (value := clip[name]) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


# -- evaluation -----------------------------------------------------------------------------------


class Known(JsonFile):
    """Losses and clips by their keys: of the last results and of a killed process."""

    losses: dict[str, Losses]
    clips: dict[str, Clip]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return what the folder of an evaluation has."""
        killed = cls.read(folder / _KNOWN) or cls(losses={}, clips={})
        metrics = Metrics.read(folder / METRICS)
        results = metrics.results if metrics else []
        losses = {each.key: each for result in results for each in result.losses.values()}
        clips = {each.key: each for result in results for each in result.clips.values()}
        # Earlier releases name the clips of a killed process by their files.
        clips |= {each.key: each for each in killed.clips.values()}
        return cls(losses=losses | killed.losses, clips=clips)


class _Evaluation:
    """One evaluation, from order to results."""

    def __init__(self, order: EvaluationOrder, training: WanOrder, adapter: str) -> None:
        self.order, self.training, self.adapter = order, training, adapter
        self.folder = Path(order.output)
        self.network = training_digest(training)
        self.recipe = WanRecipe(training)
        self.objective = self.recipe.make_objective()
        self.cases, self.caches = cases_of(self.recipe)
        self.known = Known.of(self.folder)
        self.device, self.dtype = pick_device(), DTYPES[training.trainer.mixed_precision]
        hint = "lower the run's `validation.clips` to 0, or end other programs"
        self.painter = Painter(order, self.device, self.dtype, hint)
        shown = [case for case in self.cases if case.resolution == order.resolution]
        shown.sort(key=lambda case: case.size[0] == 1)  # videos before images
        self.shown = shown[: order.clips]

    def _loss_key(self, case: Case, kind: Kind) -> str:
        adapter = self.adapter if kind == "adapter" else ""
        made_of = [case.latents_key, case.text_key, self.network, adapter, TIMESTEPS]
        return digest.of_value([VERSION, "loss", *made_of])

    def _clip_key(self, case: Case, kind: Kind) -> str:
        order = self.order
        if kind == "real":
            made_of = [case.latents_key, order.weights, order.settings.fps]
            return digest.of_value([VERSION, "real", *made_of])
        size = dict(zip(("frames", "height", "width"), case.size, strict=True))
        adapter = self.adapter if kind == "adapter" else ""
        drawn = order.key(case.text_key, order.seeds[0], adapter, **size)
        first = case.latents_key if self.training.image_to_video else ""
        return digest.of_value([VERSION, drawn, first, self.network])

    def run(self) -> Metrics:
        """Compute what is missing; return and write all results.

        Raises:
            UserError: a file is damaged or gone, memory does not suffice, the disk is full.
        """
        # Items of the same caches share losses and clips.
        losses = {self._loss_key(case, kind): (case, kind) for case in self.cases for kind in _MADE}
        clips = {self._clip_key(case, kind): (case, kind) for case in self.shown for kind in KINDS}
        losses = {key: each for key, each in losses.items() if key not in self.known.losses}
        clips = {key: each for key, each in clips.items() if not self._is_there(key)}
        for key, (case, kind) in clips.items():
            if kind == "real":
                self._write(key, case, kind, self.caches.batch([case.number]).latents[0])
        drawn = {key: each for key, each in clips.items() if each[1] != "real"}
        steps = self.order.settings.num_inference_steps
        if total := TIMESTEPS * len(losses) + steps * len(drawn):
            name = f"evaluation of {self.order.run}"
            with Progress(total=total, unit="step", desc=name) as progress:
                self._use_networks(losses, drawn, progress)
        metrics = self._metrics()
        metrics.write(self.folder / METRICS)
        named = {clip.file for clip in metrics.clips()}
        for path in self.folder.glob("*.mp4"):
            if path.name not in named and re.fullmatch(CLIP_NAME, path.name):
                path.unlink(missing_ok=True)
        (self.folder / _KNOWN).unlink(missing_ok=True)
        return metrics

    def _is_there(self, key: str) -> bool:
        clip = self.known.clips.get(key)
        path = self.folder / clip.file if clip else self.folder
        return clip is not None and path.is_file() and digest.of_file(path) == clip.digest

    def _use_networks(
        self,
        losses: Mapping[str, tuple[Case, Kind]],
        drawn: Mapping[str, tuple[Case, Kind]],
        progress: Progress,
    ) -> None:
        network = self.recipe.make_network(
            channels=self.caches.channels, text_width=self.caches.text_width, dtype=self.dtype
        )
        self.painter.use(network.eval().requires_grad_(False))
        for made in _MADE:
            if made == "adapter":  # until then its LoRA changes nothing
                self.recipe.read_copy(network, Path(self.training.output))
            for key, case in ((key, case) for key, (case, kind) in losses.items() if kind == made):
                values = []
                for value in losses_of(
                    self.objective, network, self.caches, case, self.device, self.dtype
                ):
                    values.append(value)
                    progress.update()
                self.known.losses[key] = Losses(key=key, values=values)
                self.known.write(self.folder / _KNOWN)
            for key, case in ((key, case) for key, (case, kind) in drawn.items() if kind == made):
                self._write(key, case, made, self._draw(case, progress))

    def _draw(self, case: Case, progress: Progress) -> torch.Tensor:
        batch = self.caches.batch([case.number])
        condition = None
        if FIRST_FRAME in batch.more:
            seen = batch.more.get(CLIP)
            condition = Condition(batch.more[FIRST_FRAME][0], None if seen is None else seen[0])
        noise = noise_of(self.order.seeds[0], *case.size)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.painter.draw(batch.text[0], noise, condition, case.name, progress.update)

    def _write(self, key: str, case: Case, kind: Kind, latents: torch.Tensor) -> None:
        words = re.sub(r"[^a-z0-9]+", "-", case.item.stem.lower())[-_WORDS:].strip("-")
        file = f"{words}-{key[:12]}_{kind}.mp4".removeprefix("-")
        frames = self.painter.write(self.folder / file, latents, case.name)
        self.known.clips[key] = Clip(
            key=key,
            file=file,
            digest=digest.of_file(self.folder / file),
            width=frames.shape[2],
            height=frames.shape[1],
            frames=len(frames),
            figures=figures_of(frames),
        )
        self.known.write(self.folder / _KNOWN)

    def _metrics(self) -> Metrics:
        results = [
            Result(
                name=case.name,
                source=case.item.source,
                caption=caption_in(case.text),
                losses={kind: self.known.losses[self._loss_key(case, kind)] for kind in _MADE},
                clips={
                    kind: self.known.clips[self._clip_key(case, kind)]
                    for kind in KINDS
                    if case in self.shown
                },
            )
            for case in self.cases
        ]
        losses = {kind: [each.losses[kind].values for each in results] for kind in _MADE}
        by_timestep = {kind: np.mean(each, axis=0).tolist() for kind, each in losses.items()}
        figures = {
            kind: mean_of([each.clips[kind].figures for each in results if each.clips])
            for kind in KINDS
        }
        items = f"{len(self.cases)} held out, {len(self.shown)} with clips"
        settings = settings_of(self.order, self.training, self.adapter)
        lock = lock_content(self.training.lock)
        return Metrics(
            run=self.order.run,
            wanted=self.order.wanted(lock, self.adapter, self.network),
            timesteps=timesteps_of(self.objective).tolist(),
            loss={kind: float(np.mean(each)) for kind, each in by_timestep.items()},
            loss_by_timestep=by_timestep,
            figures=figures if self.shown else {},
            fps=self.order.settings.fps,
            settings={"items": items, **settings},
            results=results,
        )


def evaluate(order: EvaluationOrder) -> Metrics | None:
    """Bring the results of an order up to date; None where they were.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    found = read_order(Path(order.training), WanOrder)
    training = decided(as_begun(found, wanted(found)))  # in the precision that it was trained in
    adapter = adapter_digest(order)
    want = order.wanted(lock_content(training.lock), adapter, training_digest(training))
    settings = settings_of(order, training, adapter)
    if not result_reasons(order, want, settings):
        return None
    return _Evaluation(order, training, adapter).run()
