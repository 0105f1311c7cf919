"""Clips of Wan's network with and without its LoRA, and losses on items that did not train.

Each clip is decoded as it is drawn: a killed process loses the clip in hand. Noise and timesteps of
the losses are fixed by the keys of the items.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.caches.encoders.device import compute_dtype, pick_device
from latentmake.errors import CacheError, TrainingError
from latentmake.files import cachefile
from latentmake.progress import Progress, say
from latentmake.training.loop.caches import (
    HINT,
    WAN,
    Caches,
    find_not_finite,
    read_items,
    read_text,
)
from latentmake.training.loop.launch import read
from latentmake.training.loop.recipe import DTYPES, decided, held_out_noise
from latentmake.training.order import JsonFile, caption_in
from latentmake.training.wan.clips import (
    CLIP_NAME,
    INDEX,
    KINDS,
    METRICS,
    TIMESTEPS,
    Clip,
    EvaluatedClip,
    EvaluationOrder,
    Figures,
    GenerationIndex,
    GenerationOrder,
    Kind,
    Losses,
    Metrics,
    Result,
    adapter_digest,
    captions_of,
    evaluated_name,
    fault_of,
    judged,
    result_reasons,
    settings_of,
)
from latentmake.training.wan.dit import WanOrder
from latentmake.training.wan.recipe import (
    CLIP,
    FIRST_FRAME,
    Denoiser,
    Objective,
    WanRecipe,
    load_transformer,
    read_lora,
)
from latentmake.training.wan.sampling import Condition, Painter, condition_of, noise_of

_MADE: tuple[Kind, ...] = ("base", "adapter")
_KNOWN = ".parts.json"
_LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709, of the values as they are stored


def generate(order: GenerationOrder) -> None:
    """Bring the clips of an order up to date.

    Clips that are out of date stay until all others are there.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    order, folder, adapter = captions_of(order), Path(order.output), adapter_digest(order)
    index = GenerationIndex.read(folder / INDEX)
    clips = {clip.file: clip for clip in index.clips} if index else {}
    if missing := judged(order, clips.values(), adapter)[1]:
        for clip in _draw(order, missing):
            clips[clip.file] = clip
            _write_index(order, clips.values())
    good, _ = judged(order, clips.values(), adapter)
    _write_index(order, good)
    for file in clips.keys() - {clip.file for clip in good}:
        (folder / file).unlink(missing_ok=True)


def _write_index(order: GenerationOrder, clips: Iterable[Clip]) -> None:
    index = GenerationIndex(
        run=order.run, weights=order.weights, settings=order.shown(), clips=[*clips]
    )
    index.write(Path(order.output) / INDEX)


def _draw(order: GenerationOrder, missing: Sequence[Clip]) -> Iterator[Clip]:
    """Draw clips, and yield each when its file is there."""
    device = pick_device()
    dtype = compute_dtype(device, "bfloat16", lambda line: None)
    say(f"{order.run}: clips to draw: {len(missing)}, on {device.type}")
    settings, condition = order.settings, condition_of(order, device)
    hint = "lower generate.frames or generate.resolution, or end other programs"
    painter = Painter(order, device, dtype, hint)
    network = _load(order, dtype, lora=any(clip.adapter for clip in missing))
    painter.use(network, _negative(order))
    texts = {each.prompt: each.text for each in order.prompts}
    total = len(missing) * settings.num_inference_steps
    with Progress(total=total, unit="step", desc=f"clips of {order.run}") as progress:
        for clip in missing:
            for each, _ in network.networks():
                if getattr(each, "peft_config", None):
                    (each.enable_adapters if clip.adapter else each.disable_adapters)()
            text = read_text(texts[clip.prompt], WAN)["text"]
            where = f"run {order.run}: {clip.file}"
            noise = noise_of(clip.seed, settings.frames, settings.height, settings.width)
            latents = painter.draw(text, noise, condition, where, progress.update)
            path = Path(order.output, clip.file)
            painter.write(path, latents, where)
            yield clip.model_copy(update={"size": path.stat().st_size})


def _negative(order: GenerationOrder) -> torch.Tensor | None:
    return None if order.negative is None else read_text(order.negative, WAN)["text"]


def _load(order: GenerationOrder, dtype: torch.dtype, *, lora: bool) -> Denoiser:
    model, networks, files = order.model, list[Any](), iter(order.adapters)
    for path in (model.dit, model.dit_high_noise):
        network = None if path is None else load_transformer(path, dtype=dtype)
        if network is not None and lora:
            try:
                read_lora(network, file := Path(next(files)), order.strength)
            except TrainingError as error:
                if order.lora is None:
                    raise
                hint = f"correct runs.{order.run}.generate.lora"
                raise TrainingError(error.what, where=file, hint=hint) from None
        networks.append(network)
    if model.version.boundary is not None and None in networks:
        say(f"{order.run}: the model names one of Wan 2.2's two networks, which draws all steps")
    low, high_noise = networks
    boundary = order.settings.timestep_boundary or 0.0
    return Denoiser(low, high_noise, boundary).eval().requires_grad_(False)


# -- losses ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One held-out item at one resolution, of a video its first clip.

    Attributes:
        number: of its example in the caches.
        name: dataset, stem and resolution.
        size: frames, height and width of its clip.
        keys: of the cache files of its latents and its text.
    """

    number: int
    name: str
    stem: str
    source: str
    caption: str
    resolution: str
    size: tuple[int, int, int]
    keys: tuple[str, str]


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
    for row, size, example in zip(caches.rows, caches.resolutions, caches.examples, strict=False):
        latents, text = example.latents.path, example.text.path
        _, frames, height, width = example.shape
        case = Case(
            number=len(found),
            name=f"{row.dataset}/{row.stem} {size}",
            stem=row.stem,
            source=row.source,
            caption=caption_in(text),
            resolution=size,
            size=(4 * frames - 3, 8 * height, 8 * width),
            keys=(cachefile.read_header(latents).key, cachefile.read_header(text).key),
        )
        found.append(case)
    return found, caches


def timesteps_of(objective: Objective) -> torch.Tensor:
    """Return the timesteps [10] of an evaluation: in the middle of ten equal shares."""
    return objective.at((torch.arange(TIMESTEPS) + 0.5) / TIMESTEPS)


@torch.no_grad()
def losses_of(
    objective: Objective,
    network: Denoiser,
    caches: Caches,
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    done: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return an item's loss at each of `timesteps_of`; `done` is called after each.

    The noise is the same for every network, and for whatever else is held out.

    Raises:
        CacheError: a cache file holds NaN or infinite values.
        TrainingError: the network's prediction is NaN or infinite.
    """
    batch, losses = caches.batch([case.number]), []
    for number, timestep in enumerate(timesteps_of(objective)):
        noise = held_out_noise(batch.latents.shape, case.keys[0], number)
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
        losses.append(loss)
        done()
    return losses


# -- figures ---------------------------------------------------------------------------------------


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


# -- evaluation ------------------------------------------------------------------------------------


class Known(JsonFile):
    """Losses and clips by their keys: of the last results and of a killed process."""

    losses: dict[str, Losses]
    clips: dict[str, EvaluatedClip]

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

    def __init__(self, order: EvaluationOrder, training: WanOrder) -> None:
        self.order, self.training, self.adapter = order, training, adapter_digest(order)
        self.folder = Path(order.output)
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
        return self.order.loss_key(self.training, case.keys, adapter)

    def _clip_key(self, case: Case, kind: Kind) -> str:
        if kind == "real":
            return self.order.real_key(case.keys[0])
        adapter = self.adapter if kind == "adapter" else ""
        return self.order.drawn_key(self.training, case.keys, adapter, case.size)

    def run(self) -> Metrics:
        """Make what is missing; return and write all results."""
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
        return clip is not None and not fault_of(clip, self.order.output)

    def _use_networks(
        self,
        losses: dict[str, tuple[Case, Kind]],
        drawn: dict[str, tuple[Case, Kind]],
        progress: Progress,
    ) -> None:
        network = self.recipe.make_network(
            channels=self.caches.channels, text_width=self.caches.text_width, dtype=self.dtype
        )
        negative = _negative(self.order) if drawn else None
        self.painter.use(network.eval().requires_grad_(False), negative)
        for made in _MADE:
            if made == "adapter":  # until then its LoRA changes nothing
                self.recipe.read_copy(network, Path(self.training.output))
            for key, (case, kind) in losses.items():
                if kind == made:
                    values = losses_of(
                        self.objective,
                        network,
                        self.caches,
                        case,
                        device=self.device,
                        dtype=self.dtype,
                        done=progress.update,
                    )
                    self.known.losses[key] = Losses(key=key, values=values)
                    self.known.write(self.folder / _KNOWN)
            for key, (case, kind) in drawn.items():
                if kind == made:
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
        path = self.folder / evaluated_name(case.stem, key, kind)
        frames = self.painter.write(path, latents, case.name)
        figures = figures_of(frames)
        self.known.clips[key] = EvaluatedClip.written(path, key, [*frames], figures)
        self.known.write(self.folder / _KNOWN)

    def _metrics(self) -> Metrics:
        results = [
            Result(
                name=case.name,
                source=case.source,
                caption=case.caption,
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
        return Metrics(
            run=self.order.run,
            wanted=self.order.wanted(self.training, self.adapter),
            timesteps=timesteps_of(self.objective).tolist(),
            loss={kind: float(np.mean(each)) for kind, each in by_timestep.items()},
            loss_by_timestep=by_timestep,
            figures=figures if self.shown else {},
            fps=self.order.settings.fps,
            settings={"items": items, **settings_of(self.order, self.training, self.adapter)},
            results=results,
        )


def evaluate(order: EvaluationOrder) -> Metrics | None:
    """Bring the results of an order up to date; None where they were.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    training = decided(read(Path(order.training), WanOrder))  # as it was trained
    return _Evaluation(order, training).run() if result_reasons(order, training) else None
