"""Clips of a network with and without its training, and losses on items that did not train.

Each clip is decoded as it is drawn: a killed process loses the clip in hand. Noise and timesteps of
the losses are fixed by the keys of the items.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.caches.encoders.device import pick_device
from latentmake.errors import CacheError, TrainingError
from latentmake.files import cachefile
from latentmake.progress import Progress, say
from latentmake.training.loop.caches import HINT, Batch, Caches, find_not_finite, read_items
from latentmake.training.loop.clips import (
    CLIP_NAME,
    INDEX,
    KINDS,
    METRICS,
    TIMESTEPS,
    Clip,
    EvaluatedClip,
    EvaluationOrder,
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
from latentmake.training.loop.launch import read
from latentmake.training.loop.order import Prompt
from latentmake.training.loop.plan import LoopBackend
from latentmake.training.loop.recipe import (
    DTYPES,
    Network,
    Objective,
    Recipe,
    decided,
    item_losses,
    spread_timesteps,
)
from latentmake.training.order import JsonFile, caption_in

_MADE: tuple[Kind, ...] = ("base", "adapter")
_KNOWN = ".parts.json"
_Made = TypeVar("_Made")
Done = Callable[[], object]
Size3 = tuple[int, int, int]


class Painter:
    """Draws and writes clips by a network, with and without its training. A trainer has its own.

    Attributes:
        order: of the clips.
        device: of the network.
        hint: repair where memory does not suffice.
        returns: whether the network can do without its training again.
        load: loads the network, and the LoRA if any clip needs it.
        adapt: draws with what was trained from now on, or without it.
        use: takes a network, and the dtype of its inputs.
        latents: draws the unscaled latents of a clip; the batch is that of an evaluated item. None
            where memory does not suffice.
        pixels: writes a clip; returns its frames [F, H, W, 3], or None likewise.
    """

    returns: bool = True
    load: Callable[[bool], None]
    adapt: Callable[[bool], None]
    use: Callable[[Any, torch.dtype], None]
    latents: Callable[[Prompt, int, Size3, Batch | None, Done], torch.Tensor | None]
    pixels: Callable[[Path, torch.Tensor], NDArray[np.uint8] | None]

    def __init__(self, order: GenerationOrder) -> None:
        self.order, self.device = order, pick_device()
        lower = "generate.frames or generate.resolution"
        if isinstance(order, EvaluationOrder):
            lower = "the run's `validation.clips` to 0"
        self.hint = f"lower {lower}, or end other programs"

    def draw(self, where: str, *options: Any) -> torch.Tensor:
        """Return the latents of a clip; see `latents`.

        Raises:
            TrainingError: memory does not suffice, or they are NaN or infinite.
        """
        latents = self._fitting(self.latents(*options), "draw", where)
        if not latents.isfinite().all():
            hint = "look at the training's loss; lower guidance_scale"
            what = f"this {self.order.noun} is NaN or infinite"
            raise TrainingError(what, where=where, hint=hint)
        return latents

    def write(self, path: Path, latents: torch.Tensor, where: str) -> NDArray[np.uint8]:
        """Write a clip; return its frames [F, H, W, 3].

        Raises:
            TrainingError: memory does not suffice, even in tiles.
            StorageError: the disk is full.
        """
        return self._fitting(self.pixels(path, latents), "decode", where, ", even in tiles")

    def _fitting(self, made: _Made | None, verb: str, where: str, how: str = "") -> _Made:
        if made is None:
            what = f"memory does not suffice to {verb} this {self.order.noun}{how}"
            raise TrainingError(what, where=where, hint=self.hint)
        return made


def generate(order: GenerationOrder, painter: Painter) -> None:
    """Bring the clips of an order up to date.

    Clips that are out of date stay until all others are there.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    order, folder, adapter = captions_of(order), Path(order.output), adapter_digest(order)
    index = GenerationIndex.read(folder / INDEX)
    clips = {clip.file: clip for clip in index.clips} if index else {}
    if missing := judged(order, clips.values(), adapter)[1]:
        for clip in _draw(order, painter, missing):
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


def _draw(order: GenerationOrder, painter: Painter, missing: Sequence[Clip]) -> Iterator[Clip]:
    """Draw clips, and yield each when its file is there."""
    settings, noun = order.settings, order.noun
    say(f"{order.run}: {noun}s to draw: {len(missing)}, on {painter.device.type}")
    try:
        painter.load(any(clip.adapter for clip in missing))
    except TrainingError as error:
        if order.lora is None:
            raise
        hint = f"correct runs.{order.run}.generate.lora"
        raise TrainingError(error.what, where=error.where, hint=hint) from None
    prompts = {each.prompt: each for each in order.prompts}
    size = settings.frames or 1, settings.height, settings.width
    total = len(missing) * settings.num_inference_steps
    with Progress(total=total, unit="step", desc=f"{noun}s of {order.run}") as progress:
        for clip in sorted(missing, key=lambda each: not painter.returns and bool(each.adapter)):
            painter.adapt(bool(clip.adapter))
            where, path = f"run {order.run}: {clip.file}", Path(order.output, clip.file)
            prompt = prompts[clip.prompt]
            latents = painter.draw(where, prompt, clip.seed, size, None, progress.update)
            painter.write(path, latents, where)
            yield clip.model_copy(update={"size": path.stat().st_size})


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


def cases_of(recipe: Recipe) -> tuple[list[Case], Caches]:
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
        case = Case(
            number=len(found),
            name=f"{row.dataset}/{row.stem} {size}",
            stem=row.stem,
            source=row.source,
            caption=caption_in(text),
            resolution=size,
            size=recipe.clip_size(example.latents),
            keys=(cachefile.read_header(latents).key, cachefile.read_header(text).key),
        )
        found.append(case)
    return found, caches


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which a network computes; float32 needs none."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def losses_of(
    objective: Objective,
    network: Network,
    caches: Caches,
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    done: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return an item's loss at each timestep of an evaluation; `done` is called after each.

    Raises:
        CacheError: a cache file holds NaN or infinite values.
        TrainingError: the network's prediction is NaN or infinite.
    """

    def of(batch: Batch, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        with autocast(device, dtype):
            return objective.losses(
                network, batch, noise, timesteps, device=device, dtype=dtype
            ).raw

    losses: list[float] = []
    timesteps = spread_timesteps(objective, TIMESTEPS)
    for loss in item_losses(of, caches, case.number, timesteps):
        if not math.isfinite(loss):
            if damaged := find_not_finite(caches, [case.number]):
                what = "holds values that are NaN or infinite"
                raise CacheError(what, where=damaged[0], hint=HINT)
            hint = "look at the training's loss, and at the weights of the network"
            raise TrainingError("the loss is NaN or infinite", where=case.name, hint=hint)
        losses.append(loss)
        done()
    return losses


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

    def __init__(self, order: EvaluationOrder, recipe: Recipe, painter: Painter) -> None:
        self.order, self.training, self.adapter = order, recipe.order, adapter_digest(order)
        self.folder = Path(order.output)
        self.recipe, self.painter = recipe, painter
        self.objective = recipe.make_objective()
        self.cases, self.caches = cases_of(self.recipe)
        self.known = Known.of(self.folder)
        self.dtype = DTYPES[self.training.trainer.mixed_precision]
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
                stored = self.caches.examples[case.number].latents
                scaled = self.caches.batch([case.number]).latents[0]
                self._write(key, case, kind, scaled / stored.scaling + stored.shift)
        drawn = {key: each for key, each in clips.items() if each[1] != "real"}
        steps = self.order.settings.num_inference_steps
        if total := TIMESTEPS * len(losses) + steps * len(drawn):
            name = f"evaluation of {self.order.run}"
            with Progress(total=total, unit="step", desc=name) as progress:
                self._use_networks(losses, drawn, progress)
        metrics = self._metrics()
        metrics.write(self.folder / METRICS)
        named = {clip.file for clip in metrics.clips()}
        for path in self.folder.glob(f"*{self.order.suffix}"):
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
        self.painter.use(network.eval().requires_grad_(False), self.dtype)
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
                        device=self.painter.device,
                        dtype=self.dtype,
                        done=progress.update,
                    )
                    self.known.losses[key] = Losses(key=key, values=values)
                    self.known.write(self.folder / _KNOWN)
            for key, (case, kind) in drawn.items():
                if kind == made:
                    text = self.caches.examples[case.number].text.path
                    asked = Prompt(prompt=case.caption, text=text), self.order.seeds[0], case.size
                    batch = self.caches.batch([case.number])
                    with autocast(self.painter.device, self.dtype):
                        latents = self.painter.draw(case.name, *asked, batch, progress.update)
                    self._write(key, case, made, latents)

    def _write(self, key: str, case: Case, kind: Kind, latents: torch.Tensor) -> None:
        path = self.folder / evaluated_name(case.stem, key, kind, self.order.suffix)
        frames = self.painter.write(path, latents, case.name)
        self.known.clips[key] = EvaluatedClip.written(path, key, [*frames])
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
        items = f"{len(self.cases)} held out, {len(self.shown)} with {self.order.noun}s"
        return Metrics(
            run=self.order.run,
            wanted=self.order.wanted(self.training, self.adapter),
            timesteps=spread_timesteps(self.objective, TIMESTEPS).tolist(),
            loss={kind: float(np.mean(each)) for kind, each in by_timestep.items()},
            loss_by_timestep=by_timestep,
            fps=self.order.settings.fps or 1,
            settings={"items": items, **settings_of(self.order, self.training, self.adapter)},
            results=results,
        )


def follow(order: GenerationOrder, backend: LoopBackend) -> Metrics | None:
    """Bring the clips of an order up to date; or results of an evaluation, which are returned then.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    training = decided(read(Path(order.training), backend.order_type))  # as it was trained
    recipe = backend.recipe(training)
    if not isinstance(order, EvaluationOrder):
        generate(order, backend.painter(order, recipe))
    elif result_reasons(order, training):
        return _Evaluation(order, recipe, backend.painter(order, recipe)).run()
    return None
