"""Clips of a network with and without its training, and its losses on held-out items.

Each clip is decoded and written as soon as it is drawn, so a killed process loses one clip at most.
The noise of a loss follows from the key of the item, so it is the same for every network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from latentmake.base import digest
from latentmake.base.errors import CacheError, TrainingError, shortened
from latentmake.base.progress import Progress, say
from latentmake.base.state_file import JsonFile
from latentmake.encode.encoders.device import pick_device
from latentmake.runs.order import caption_in
from latentmake.runs.results import (
    CLIP_NAME,
    INDEX,
    KINDS,
    METRICS,
    Clip,
    EvaluatedClip,
    GenerationIndex,
    Kind,
    Losses,
    Metrics,
    Result,
)
from latentmake.trainers.loop.caches import HINT, Caches, find_not_finite, read_items
from latentmake.trainers.loop.generation import (
    EVALUATION,
    TIMESTEPS,
    EvaluationOrder,
    GenerationOrder,
    adapter_digest,
    captions_of,
    evaluated_name,
    fault_of,
    kept_and_missing,
    result_reasons,
)
from latentmake.trainers.loop.recipe import Painter, Recipe

_MADE: tuple[Kind, ...] = ("base", "adapter")
_FINISHED = ".parts.json"  # losses and clips of an evaluation that has not ended


def _written(
    painter: Painter, path: Path, latents: torch.Tensor, noun: str, where: str
) -> NDArray[np.uint8]:
    """Write a clip, and return its frames [F, H, W, 3].

    Raises:
        TrainingError: the clip is NaN or infinite.
        MemoryError: memory does not suffice to decode it.
    """
    try:
        frames = painter.write(path, latents)
    except FloatingPointError as error:
        what = f"this {noun} is NaN or infinite"
        raise TrainingError(what, where=where, hint=str(error)) from None
    if frames is None:
        raise MemoryError(path)
    return frames


def generate(order: GenerationOrder, recipe: Recipe) -> None:
    """Bring the clips of an order up to date; outdated clips are removed at the end."""
    order, folder, adapter = captions_of(order), Path(order.output), adapter_digest(order)
    last = GenerationIndex.read(folder / INDEX)
    clips = {clip.file: clip for clip in last.clips} if last else {}
    index = GenerationIndex(run=order.run, parts=order.parts(adapter), clips=[])
    _, missing = kept_and_missing(order, () if order.forced else clips.values(), adapter)
    for clip in _draw(order, recipe, missing) if missing else ():
        clips[clip.file] = clip
        index.model_copy(update={"clips": [*clips.values()]}).write(folder / INDEX)
    kept, _ = kept_and_missing(order, clips.values(), adapter)
    index.model_copy(update={"clips": kept}).write(folder / INDEX)
    for file in clips.keys() - {clip.file for clip in kept}:
        (folder / file).unlink(missing_ok=True)


def _draw(order: GenerationOrder, recipe: Recipe, missing: Sequence[Clip]) -> Iterator[Clip]:
    """Draw clips, first without the training, and yield each clip when its file is written."""
    settings, noun, device = order.settings, order.noun, pick_device()
    say(f"{order.run}: {noun}s to draw: {len(missing)}, on {device.type}")
    caches = Caches(read_items(Path(order.manifest))[:1], recipe.tensors)
    stored = caches.examples[0].latents
    painter = recipe.painter(recipe, settings, order.negative, stored, device, order)
    texts = {prompt.prompt: prompt.text for prompt in order.prompts}
    total, faulty = len(missing) * settings.num_inference_steps, list[TrainingError]()
    with Progress(total=total, unit="step", desc=f"{noun}s of {order.run}") as progress:
        for used in _networks(order, painter, caches, {bool(clip.adapter) for clip in missing}):
            for clip in (clip for clip in missing if bool(clip.adapter) == used):
                path = Path(order.output, clip.file)
                where = f"run {order.run}: {path.name} (`{shortened(clip.prompt)}`)"
                seed = painter.noise_seed(clip.seed, clip.prompt)
                options = texts[clip.prompt], seed, settings.size, progress.update, None
                with painter.autocast():
                    latents = painter.latents(*options)
                try:
                    _written(painter, path, latents, noun, where)
                except TrainingError as error:
                    say(f"warning: {error}")
                    faulty.append(error)
                    continue
                yield clip.model_copy(update={"size": path.stat().st_size})
    if faulty:
        first, count = faulty[0], len(faulty)
        what = f"{count} of {len(missing)} {noun}s are NaN or infinite and left out"
        raise TrainingError(what, where=f"run {order.run}", hint=first.hint)


def _networks(
    order: GenerationOrder, painter: Painter, caches: Caches, needed: Collection[bool]
) -> Iterator[bool]:
    """Give a painter the network without its training, and then with it.

    `needed` has False and True for the networks that are needed.

    Yields:
        Whether the painter's network is the trained one.
    """
    recipe = painter.recipe
    network = recipe.make_network(
        channels=caches.channels, text_width=caches.text_width, dtype=painter.dtype, plain=True
    )
    for used in sorted(needed):
        if used:
            try:
                recipe.read_copy(network, order.files, order.strength)
            except TrainingError as error:
                if order.lora is None:
                    raise
                hint = f"correct runs.{order.run}.generate.lora"
                raise TrainingError(error.what, where=error.where, hint=hint) from None
        painter.network, painter.is_trained = network.eval().requires_grad_(False), used
        recipe.place(network, painter.device, lend=True)
        yield used


# -- losses ----------------------------------------------------------------------------------------


def held_out(recipe: Recipe) -> Caches:
    """Return the caches of a run's held-out items, with the first clip of each video.

    Raises:
        UserError: there are no such items, or a file is missing or damaged.
    """
    rows = [
        row.model_copy(update={"latents": {size: row.latents_at(size)[:1] for size in row.latents}})
        for row in read_items(Path(recipe.order.manifest), held_out=True)
    ]
    return Caches(rows, recipe.tensors)


def name_of(caches: Caches, number: int) -> str:
    """Return dataset, stem and resolution of an item."""
    row = caches.rows[number]
    return f"{row.dataset}/{row.stem} {caches.resolutions[number]}"


# -- evaluation ------------------------------------------------------------------------------------


class Finished(JsonFile):
    """Losses and clips by their keys, from the last results and from a killed process."""

    losses: dict[str, Losses] = Field({})
    clips: dict[str, EvaluatedClip] = Field({})

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the losses and clips in the folder of an evaluation."""
        killed = cls.read(folder / _FINISHED) or cls()
        metrics = Metrics.read(folder / METRICS)
        results = metrics.results if metrics else []
        losses = {losses.key: losses for result in results for losses in result.losses.values()}
        clips = {clip.key: clip for result in results for clip in result.clips.values()}
        return cls(losses=losses | killed.losses, clips=clips | killed.clips)


class _Evaluation:
    """An evaluation, from order to results.

    Attributes:
        finished: losses and clips that are up to date; new ones are added.
        sizes: frames, height and width of each item.
        shown: numbers of the items with clips.
    """

    def __init__(self, order: EvaluationOrder, recipe: Recipe) -> None:
        self.order, self.recipe, self.training = order, recipe, recipe.order
        self.folder, self.adapter = Path(order.output), adapter_digest(order)
        self.caches = caches = held_out(recipe)
        self.finished = Finished() if order.forced else Finished.of(self.folder)
        examples = caches.examples[: len(caches)]
        self.sizes = [recipe.clip_size(example.latents) for example in examples]
        shown = [item for item, size in enumerate(caches.resolutions) if size == order.resolution]
        shown.sort(key=lambda item: self.sizes[item][0] == 1)  # videos before images
        self.shown = shown[: order.clips]
        painting = order.settings, order.negative, examples[0].latents, pick_device()
        self.painter = recipe.painter(recipe, *painting)

    def _keys(self, item: int) -> tuple[str, str]:
        """Return the keys of the cache files of an item's latents and text."""
        example = self.caches.examples[item]
        return example.latents.key, example.text.key

    def _loss_key(self, item: int, kind: Kind) -> str:
        adapter = self.adapter if kind == "adapter" else ""
        made_from = [*self._keys(item), self.training.loss_digest(), adapter, TIMESTEPS]
        return digest.of_value([EVALUATION, "loss", *made_from])

    def _clip_key(self, item: int, kind: Kind) -> str:
        order, (latents, text) = self.order, self._keys(item)
        if kind == "real":
            return digest.of_value([EVALUATION, "real", latents, order.weights, order.settings.fps])
        adapter = self.adapter if kind == "adapter" else ""
        size = dict(zip(("frames", "height", "width"), self.sizes[item], strict=True))
        drawn = order.key(text, order.seeds[0], adapter, **size)
        first = latents if self.training.model.image_to_video else ""
        return digest.of_value([EVALUATION, drawn, first, self.training.loss_digest()])

    def run(self) -> Metrics:
        """Make missing losses and clips, and write and return all results."""
        # Items with the same caches have the same keys, and so share losses and clips.
        wanted: dict[str, tuple[Callable[..., None], int, Kind]] = {
            self._loss_key(item, kind): (self._lose, item, kind)
            for item in range(len(self.caches))
            for kind in _MADE
        }
        wanted |= {
            self._clip_key(item, kind): (self._film, item, kind)
            for item in self.shown
            for kind in KINDS
        }
        todo = {key: part for key, part in wanted.items() if not self._is_there(key)}
        steps = {self._lose: TIMESTEPS, self._film: self.order.settings.num_inference_steps}
        total = sum(steps[make] for make, _, kind in todo.values() if kind != "real")
        name = f"evaluation of {self.order.run}"
        with Progress(total=total, unit="step", desc=name, disable=not total) as progress:
            for phase in self._phases({kind for *_, kind in todo.values()}):
                for key, (make, item, kind) in todo.items():
                    if kind == phase:
                        make(key, item, kind, progress.update)
                        self.finished.write(self.folder / _FINISHED)
        metrics = self._metrics()
        metrics.write(self.folder / METRICS)
        named = {clip.file for clip in metrics.clips()}
        for path in self.folder.glob(f"*{self.order.settings.suffix}"):
            if path.name not in named and re.fullmatch(CLIP_NAME, path.name):
                path.unlink(missing_ok=True)
        (self.folder / _FINISHED).unlink(missing_ok=True)
        return metrics

    def _is_there(self, key: str) -> bool:
        clip = self.finished.clips.get(key)
        return key in self.finished.losses or (
            clip is not None and not fault_of(clip, self.order.output)
        )

    def _phases(self, kinds: Collection[Kind]) -> Iterator[Kind]:
        """Yield each kind of losses and clips when its network is ready; `real` needs none."""
        yield "real"
        needed = {kind == "adapter" for kind in kinds if kind != "real"}
        for trained in _networks(self.order, self.painter, self.caches, needed) if needed else ():
            yield _MADE[trained]

    @torch.no_grad()
    def _lose(self, key: str, item: int, _: Kind, done: Callable[[], object]) -> None:
        """Add an item's loss at each timestep, by the painter's network.

        Raises:
            CacheError: a cache file holds NaN or infinite values.
            TrainingError: the network's prediction is NaN or infinite.
        """
        losses: list[float] = []
        for loss in self.painter.item_losses(self.caches, item, TIMESTEPS):
            if not math.isfinite(loss):
                if damaged := find_not_finite(self.caches, [item]):
                    what = "holds values that are NaN or infinite"
                    raise CacheError(what, where=damaged[0], hint=HINT)
                hint = "look at the training's loss, and at the weights of the network"
                what = "the loss is NaN or infinite"
                raise TrainingError(what, where=name_of(self.caches, item), hint=hint)
            losses.append(loss)
            done()
        self.finished.losses[key] = Losses(key=key, values=losses)

    def _film(self, key: str, item: int, kind: Kind, done: Callable[[], object]) -> None:
        batch, (stored, text, *_) = self.caches.batch([item]), self.caches.examples[item]
        if kind == "real":
            latents = batch.latents[0] / stored.scaling + stored.shift
        else:
            seed = self.painter.noise_seed(self.order.seeds[0], caption_in(text.path))
            options = text.path, seed, self.sizes[item], done, batch
            with self.painter.autocast():
                latents = self.painter.latents(*options)
        stem = self.caches.rows[item].stem
        path = self.folder / evaluated_name(stem, key, kind, self.order.settings.suffix)
        name = name_of(self.caches, item)
        frames = _written(self.painter, path, latents, self.order.noun, name)
        number, height, width, _ = frames.shape
        size = {"width": width, "height": height, "frames": number}
        content = digest.of_file(path)
        self.finished.clips[key] = EvaluatedClip(key=key, file=path.name, digest=content, **size)

    def _metrics(self) -> Metrics:
        results = [
            Result(
                name=name_of(self.caches, item),
                source=row.source,
                caption=caption_in(self.caches.examples[item].text.path),
                group=row.group,
                losses={kind: self.finished.losses[self._loss_key(item, kind)] for kind in _MADE},
                clips={
                    kind: self.finished.clips[self._clip_key(item, kind)]
                    for kind in KINDS
                    if item in self.shown
                },
            )
            for item, row in enumerate(self.caches.rows)
        ]
        losses = {kind: [result.losses[kind].values for result in results] for kind in _MADE}
        by_timestep = {kind: np.mean(rows, axis=0).tolist() for kind, rows in losses.items()}
        items = f"{len(self.caches)} held out, {len(self.shown)} with {self.order.noun}s"
        return Metrics(
            run=self.order.run,
            timesteps=self.painter.objective.spread(TIMESTEPS).tolist(),
            loss={kind: float(np.mean(values)) for kind, values in by_timestep.items()},
            loss_by_timestep=by_timestep,
            fps=self.order.settings.fps or 1,
            items=items,
            results=results,
            **self.order.product(self.training, self.adapter)._asdict(),
        )


def follow(order: GenerationOrder, recipe: Recipe) -> Metrics | None:
    """Bring the clips of an order, or the results of an evaluation, up to date.

    `recipe` is the recipe of the training, with the training's precision.

    Returns:
        Results of an evaluation that was carried out, else None.

    Raises:
        UserError: a file is missing or damaged, or the disk is full.
    """
    if not isinstance(order, EvaluationOrder):
        generate(order, recipe)
    elif order.forced or result_reasons(order, recipe.order):
        return _Evaluation(order, recipe).run()
    return None
