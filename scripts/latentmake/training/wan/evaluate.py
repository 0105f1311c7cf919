"""Evaluation of Wan's network with and without its LoRA on items that did not train.

`python -m latentmake.training.wan.evaluate ORDER` computes the losses and draws the clips that are
missing, first with the network as the training began, then with the trained LoRA; then it decodes.
Networks and VAE are never in memory together.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers.utils import logging

from latentmake import digest
from latentmake.caches.encoders.device import pick_device, within_memory
from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.errors import TrainingError
from latentmake.files.mp4 import write_mp4
from latentmake.progress import Progress
from latentmake.training.clip_statistics import figures_of, mean_of
from latentmake.training.command import exit_status
from latentmake.training.evaluation import (
    KINDS,
    TIMESTEPS,
    VERSION,
    Clip,
    EvaluationOrder,
    Kind,
    Losses,
    Metrics,
    Result,
    result_reasons,
)
from latentmake.training.evaluation_parts import Parts
from latentmake.training.generation import adapter_digest
from latentmake.training.loop.accelerator import DTYPES, decided
from latentmake.training.loop.checkpoint import as_begun
from latentmake.training.loop.data.headers import read_text
from latentmake.training.loop.data.tensors import WAN
from latentmake.training.loop.evaluate import Case, cases_of, losses_of, timesteps_of
from latentmake.training.loop.result import wanted
from latentmake.training.order import caption_in, lock_content, read_order
from latentmake.training.wan.denoiser import Denoiser
from latentmake.training.wan.evaluation import settings_of, training_digest
from latentmake.training.wan.objective import CLIP, FIRST_FRAME
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.recipe import WanRecipe
from latentmake.training.wan.sampling import (
    Condition,
    Sampling,
    decode_clip,
    noise_of,
    sample_latents,
)

_MADE: tuple[Kind, ...] = ("base", "adapter")
_WORDS = 40  # characters of an item's name in that of a file


def _say(text: str) -> None:
    Progress.write(text, file=sys.stderr)


class _Part(NamedTuple):
    """A clip to make: of a case, by what, under which key, in which file."""

    case: Case
    kind: Kind
    key: str
    file: str


class _Evaluation:
    """One evaluation, from order to results."""

    def __init__(self, order: EvaluationOrder) -> None:
        self.order = order
        self.training = _training(order)
        self.adapter = adapter_digest(order.generation)
        self.network = training_digest(self.training)
        self.recipe = WanRecipe(self.training)
        self.objective = self.recipe.make_objective()
        self.cases, self.caches = cases_of(self.recipe)
        self.parts = Parts(Path(order.output))
        self.device = pick_device()
        self.dtype = DTYPES[self.training.trainer.mixed_precision]
        shown = [case for case in self.cases if case.resolution == order.resolution]
        shown.sort(key=lambda case: self._size(case)[0] == 1)  # videos before images
        self.clips = [
            _Part(case, kind, self._clip_key(case, kind), _file_name(case, kind))
            for case in shown[: order.clips]
            for kind in KINDS
        ]

    # -- keys -------------------------------------------------------------------------------------

    def _loss_key(self, case: Case, kind: Kind) -> str:
        adapter = self.adapter if kind == "adapter" else ""
        made_of = [case.latents_key, case.text_key, self.network, adapter, TIMESTEPS]
        return digest.of_value([VERSION, "loss", *made_of])

    def _clip_key(self, case: Case, kind: Kind) -> str:
        generation = self.order.generation
        if kind == "real":
            made_of = [case.latents_key, generation.weights, generation.fps]
            return digest.of_value([VERSION, "real", *made_of])
        frames, height, width = self._size(case)
        sized = generation.model_copy(update={"frames": frames, "height": height, "width": width})
        adapter = self.adapter if kind == "adapter" else ""
        drawn = sized.key(case.text_key, generation.seeds[0], adapter)
        first = case.latents_key if self.training.image_to_video else ""
        return digest.of_value([VERSION, drawn, first, self.network])

    def _size(self, case: Case) -> tuple[int, int, int]:
        """Return frames, height and width of a case's clip."""
        _, frames, height, width = self.caches.examples[case.number].shape
        return 4 * (frames - 1) + 1, 8 * height, 8 * width

    # -- networks ---------------------------------------------------------------------------------

    def run(self) -> Metrics:
        """Compute what is missing; return and write all results.

        Raises:
            UserError: a file is damaged or gone, memory does not suffice, the disk is full.
        """
        losses = {
            kind: [c for c in self.cases if self.parts.losses(self._loss_key(c, kind)) is None]
            for kind in _MADE
        }
        waiting = [each for each in self.clips if self.parts.clip(each.key, each.file) is None]
        drawn = {
            kind: [e for e in waiting if e.kind == kind and self.parts.latents(e.key) is None]
            for kind in _MADE
        }
        steps = self.order.generation.steps
        total = sum(TIMESTEPS * len(losses[kind]) + steps * len(drawn[kind]) for kind in _MADE)
        if total:
            with Progress(
                total=total, unit="step", desc=f"evaluation of {self.order.run}", file=sys.stderr
            ) as progress:
                self._use_networks(losses, drawn, progress)
        if waiting:
            self._decode(waiting)
        metrics = self._metrics()
        self.parts.finish(metrics)
        return metrics

    def _use_networks(
        self, losses: dict[Kind, list[Case]], drawn: dict[Kind, list[_Part]], progress: Progress
    ) -> None:
        network = self.recipe.make_network(
            channels=self.caches.channels, text_width=self.caches.text_width, dtype=self.dtype
        )
        network.to(self.device).eval().requires_grad_(False)
        for kind in _MADE:
            if kind == "adapter":  # until then its LoRA changes nothing
                self.recipe.read_copy(network, Path(self.training.output))
            for case in losses[kind]:
                values = []
                for value in losses_of(
                    self.objective,
                    network,
                    self.caches,
                    case,
                    device=self.device,
                    dtype=self.dtype,
                ):
                    values.append(value)
                    progress.update()
                self.parts.put_losses(Losses(key=self._loss_key(case, kind), values=values))
            for part in drawn[kind]:
                if self.parts.latents(part.key) is None:  # equal ones are drawn once
                    self.parts.put_latents(part.key, self._draw(network, part, progress))
        del network
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _draw(self, network: Denoiser, part: _Part, progress: Progress) -> torch.Tensor:
        generation = self.order.generation
        batch = self.caches.batch([part.case.number])
        condition = None
        if FIRST_FRAME in batch.more:
            seen = batch.more.get(CLIP)
            condition = Condition(batch.more[FIRST_FRAME][0], None if seen is None else seen[0])
        channels, frames, height, width = batch.latents.shape[1:]
        noise = noise_of(generation.seeds[0], (channels, frames, height, width))
        negative = generation.negative
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            latents = within_memory(
                sample_latents,
                network.networks,
                batch.text[0],
                None if negative is None else read_text(negative, WAN.text),
                noise,
                Sampling(
                    generation.steps, generation.guidance, generation.shift, generation.scheduler
                ),
                device=self.device,
                dtype=self.dtype,
                condition=condition,
                done=progress.update,
            )
        if latents is None:
            size = " x ".join(map(str, self._size(part.case)))
            raise TrainingError(
                f"memory does not suffice for a clip of {size} (frames, height, width)",
                where=part.case.name,
                hint="lower the run's `validation.clips` to 0, or end other programs",
            )
        if not latents.isfinite().all():
            raise TrainingError(
                "the clip drawn for this item is NaN or infinite",
                where=part.case.name,
                hint="look at the training's loss; lower guidance_scale",
            )
        return latents

    # -- clips ------------------------------------------------------------------------------------

    def _decode(self, waiting: Sequence[_Part]) -> None:
        """Decode latents to files: those drawn, and those of the items themselves."""
        model, folder = self.order.generation.model, Path(self.order.output)
        vae = load_wan_vae(model.vae, self.device, torch.float32, decoder=True)
        if model.vae_cache_cpu:
            vae.tile()
        with Progress(
            total=len(waiting), unit="clip", desc=f"clips of {self.order.run}", file=sys.stderr
        ) as progress:
            for part in waiting:
                if part.kind == "real":
                    latents = self.caches.batch([part.case.number]).latents[0]
                else:
                    kept = self.parts.latents(part.key)
                    assert kept is not None
                    latents = kept
                frames = decode_clip(vae, latents, _say)
                if frames is None:
                    raise TrainingError(
                        "memory does not suffice to decode this item, even in tiles",
                        where=part.case.name,
                        hint="lower the run's `validation.clips` to 0, or end other programs",
                    )
                path = folder / part.file
                write_mp4(path, frames, self.order.generation.fps)
                self.parts.put_clip(
                    Clip(
                        key=part.key,
                        file=part.file,
                        digest=digest.of_file(path),
                        width=frames.shape[2],
                        height=frames.shape[1],
                        frames=len(frames),
                        figures=figures_of(frames),
                    )
                )
                progress.update()

    # -- results ----------------------------------------------------------------------------------

    def _metrics(self) -> Metrics:
        made: dict[str, dict[Kind, Clip]] = {}
        for part in self.clips:
            clip = self.parts.clip(part.key, part.file)
            assert clip is not None
            made.setdefault(part.case.name, {})[part.kind] = clip
        results = []
        for case in self.cases:
            losses = {kind: self.parts.losses(self._loss_key(case, kind)) for kind in _MADE}
            results.append(
                Result(
                    name=case.name,
                    source=case.item.source,
                    caption=caption_in(case.text),
                    losses={kind: each for kind, each in losses.items() if each is not None},
                    clips=made.get(case.name, {}),
                )
            )
        by_timestep = {kind: _means(each.losses[kind].values for each in results) for kind in _MADE}
        figures = {
            kind: mean_of(each[kind].figures for each in made.values() if kind in each)
            for kind in KINDS
        }
        lock = lock_content(self.training.lock)
        return Metrics(
            run=self.order.run,
            wanted=self.order.wanted(lock, self.adapter, self.network),
            timesteps=timesteps_of(self.objective).tolist(),
            loss={kind: sum(each) / len(each) for kind, each in by_timestep.items()},
            loss_by_timestep={**by_timestep},
            figures=figures if made else {},
            fps=self.order.generation.fps,
            settings=self._settings(),
            results=results,
        )

    def _settings(self) -> dict[str, str]:
        return {
            "items": f"{len(self.cases)} held out, {len(self.clips) // len(KINDS)} with clips",
            **settings_of(self.order.generation, self.training, self.adapter),
        }


def _means(lists: Iterable[Sequence[float]]) -> list[float]:
    columns = list(zip(*lists, strict=True))
    return [sum(column) / len(column) for column in columns]


def _file_name(case: Case, kind: Kind) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", case.item.stem.lower())[-_WORDS:].strip("-")
    number = digest.of_bytes(case.name.encode())[:8]
    return f"{f'{words}-{number}' if words else number}_{kind}.mp4"


def _training(order: EvaluationOrder) -> WanOrder:
    """Return the order of a training, in the precision that it was trained in."""
    found = read_order(Path(order.training), WanOrder)
    return decided(as_begun(found, wanted(found)))


def evaluate(order: EvaluationOrder) -> Metrics | None:
    """Bring the results of an order up to date; None where they were.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    training = _training(order)
    adapter = adapter_digest(order.generation)
    wanted = order.wanted(lock_content(training.lock), adapter, training_digest(training))
    settings = settings_of(order.generation, training, adapter)
    if not result_reasons(order, wanted, settings):
        return None
    return _Evaluation(order).run()


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.wan.evaluate ORDER`; return the exit status."""
    logging.set_verbosity_error()
    return exit_status(lambda: evaluate(read_order(Path(arguments[0]), EvaluationOrder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
