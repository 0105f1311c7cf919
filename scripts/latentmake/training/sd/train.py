"""The trainer `sd`: Stable Diffusion 1.x and 2.x, a LoRA, parts or the whole UNet, from caches.

`accelerate launch -m latentmake.training.sd.train ORDER`. This process never loads a VAE or a text
encoder. Killed at any step and started again, it ends with the same weights: batches, noise and
timesteps follow from seed and step, all else is in the checkpoint.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch

from latentmake.errors import CacheError, TrainingError, UserError
from latentmake.files import atomic
from latentmake.progress import Progress
from latentmake.training.order import TrainingOrder, read_order
from latentmake.training.process import say_error
from latentmake.training.result import COPIED, History, Layout, Record, sample_steps, wanted
from latentmake.training.sd import checkpoint, network, objective, sampling
from latentmake.training.sd.accelerator import DTYPES, attention, make_accelerator, reseed
from latentmake.training.sd.batch_order import Schedule, generator, seed_of
from latentmake.training.sd.caption_variants import Variants
from latentmake.training.sd.data.batch import Batch
from latentmake.training.sd.data.caches import Caches, find_not_finite, read_items
from latentmake.training.sd.data.headers import HINT
from latentmake.training.sd.data.loader import prefetched
from latentmake.training.sd.learner import Learner, make_denoiser
from latentmake.training.sd.scalars import Scalars

__all__ = ["Training", "main"]

_STEPS = 1000
_LOOK = 1.0  # seconds between two looks for the file that asks for a copy


def _say(text: str) -> None:
    Progress.write(text, file=sys.stderr)


class _Step(NamedTuple):
    """What is to be said of a step: its losses, the gradients' norm, and the learning rate."""

    loss: float
    raw_loss: float
    gradient_norm: float
    qk_grads_av: float
    learning_rate: float


class Training:
    """One training, from order to weights.

    Args:
        order: what to train, on what, how.

    Raises:
        UserError: caches, network or settings do not fit; one line.
    """

    def __init__(self, order: TrainingOrder) -> None:
        self.order = order
        self.settings = order.trainer
        self.layout = Layout(order)
        self.wanted = wanted(order)
        self.caches = Caches(read_items(Path(order.manifest)))
        self.objective = objective.Objective(
            objective.load_noise_schedule(
                order.scheduler, self.settings.prediction_type, order.unet
            ),
            snr_gamma=self.settings.snr_gamma,
            noise_offset=self.settings.noise_offset,
        )
        self.accelerator = make_accelerator(self.settings)
        self.dtype = DTYPES[self.settings.mixed_precision]
        self.main = self.accelerator.is_main_process
        self.schedule = Schedule(
            [each.shape for each in self.caches.examples[: self.caches.count]],
            [each.repeats for each in self.caches.examples[: self.caches.count]],
            batch_size=self.settings.train_batch_size,
            seed=self.settings.seed,
            accumulation=self.settings.gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
        )
        self.steps = self._count_steps()
        self.variants = Variants(
            self.caches, order.texts, self.schedule, steps=self.steps, seed=self.settings.seed
        )
        denoiser = make_denoiser(
            order,
            channels=self.caches.channels,
            text_width=self.caches.text_width,
            dtype=self.dtype,
        )
        self.learner = Learner(order, denoiser, self.accelerator, steps=self.steps)
        self.sampler = sampling.make_sampler(
            order, self.objective.schedule, self.caches.examples[0].latents
        )
        self.step = 0
        self.loss_start = 0.0
        self.seconds = 0.0
        self.history = History()

    def _count_steps(self) -> int:
        settings = self.settings
        if settings.epochs is not None:
            return max(1, math.ceil(round(settings.epochs / self.schedule.epoch(1), 6)))
        return settings.steps or _STEPS

    def run(self) -> None:
        """Train, from the newest checkpoint of this very training or from the start.

        Raises:
            UserError: a cache file is damaged, the disk is full, the loss is no number.
        """
        resumed = self._resume()
        if not resumed and self.main:
            sampling.clear_rows(self.layout.samples)
            shutil.rmtree(self.layout.scalars, ignore_errors=True)
            self.loss_start = self.learner.alone(self._probe)
            if not math.isfinite(self.loss_start):
                self._refuse_not_finite(range(len(self.caches.examples)))
            _say(f"loss at the start: {self.loss_start:.4f}")
        steps_with_samples = sample_steps(self.order, self.steps)
        if not resumed and self.step in steps_with_samples:
            self._draw_samples()
        self.accelerator.wait_for_everyone()
        self._steps(steps_with_samples)
        self.accelerator.wait_for_everyone()
        if self.main:
            self._finish()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def _resume(self) -> bool:
        """Go on from the newest checkpoint of this training; tell whether there was one."""
        for found in checkpoint.find(self.layout.checkpoints, self.wanted):
            loaded = checkpoint.load(found)
            if loaded is None:
                _say(f"{found.folder} is damaged and left aside")
                continue
            self.learner.restore(loaded, found.folder)
            self.step = found.progress.step
            progress = found.progress
            self.loss_start, self.history = progress.loss_start, progress.history
            self.seconds = progress.seconds
            if self.main:
                _say(f"going on from step {self.step} ({found.folder})")
                sampling.clear_rows(self.layout.samples, self.wanted)
            return True
        if self.settings.resume_from_checkpoint is not None:
            found, loaded = checkpoint.read(Path(self.settings.resume_from_checkpoint))
            self.learner.restore(loaded, found.folder)
            self.step = found.progress.step
            if self.step >= self.steps:
                raise TrainingError(
                    f"this checkpoint is of step {self.step}, and the training ends at step "
                    f"{self.steps}",
                    where=found.folder,
                    mend="raise `steps` or `epochs`, which count from its beginning",
                )
            _say(f"beginning at step {self.step} of {found.folder}")
        return False

    def _steps(self, steps_with_samples: frozenset[int]) -> None:
        settings, first = self.settings, self.step + 1
        order = self.variants.batches(self.accelerator.process_index, first, self.steps)
        pin = self.accelerator.device.type == "cuda"
        batches = prefetched(self.caches, order, threads=settings.dataloader_num_workers, pin=pin)
        scalars = Scalars(self.layout.scalars if self.main else None, first)
        bar = Progress(
            total=self.steps,
            initial=self.step,
            unit="step",
            desc=self.order.run,
            disable=not self.main,
            file=sys.stderr,
        )
        seen, began, looked = 0, time.monotonic(), 0.0
        try:
            for step in range(first, self.steps + 1):
                clock = time.monotonic()
                said = self._one_step(step, batches)
                self.step = step
                self.history.add(step, said.loss, self.steps)
                items, now = self.schedule.items(step), time.monotonic()
                self.seconds += now - clock
                seen += items
                bar.set_postfix_str(
                    f"loss {said.loss:.4f}, {seen / (now - began):.1f} items/s", refresh=False
                )
                bar.update()
                pace = {
                    "epoch": self.schedule.epoch(step),
                    "images_per_second": items / (now - clock),
                }
                scalars.add(step, said._asdict() | pace)
                if step in steps_with_samples:
                    self._draw_samples()
                asked = False
                if self.main and now - looked > _LOOK:
                    looked, asked = now, self.layout.save.exists()
                    self.layout.save.unlink(missing_ok=True)
                if asked or step % settings.checkpointing_steps == 0:
                    scalars.flush()
                    self._save()
                if asked or self._is_copied(step):
                    self._copy()
        finally:
            batches.close()
            bar.close()
            scalars.close()

    def _is_copied(self, step: int) -> bool:
        """Whether the settings ask for a copy of the weights after this step."""
        steps, epochs = self.settings.save_every_n_steps, self.settings.save_every_n_epochs
        if steps is not None and step % steps == 0:
            return True
        if epochs is None:
            return False
        before, after = self.schedule.epoch(step - 1), self.schedule.epoch(step)
        return math.floor(after / epochs) > math.floor(before / epochs)

    def _one_step(self, step: int, batches: Iterator[Batch]) -> _Step:
        settings, accelerator, learner = self.settings, self.accelerator, self.learner
        process = accelerator.process_index
        reseed(seed_of(settings.seed, "step", step, process), accelerator.device)
        random = generator(settings.seed, "noise", step, process)
        rate = learner.rate
        # Every example counts the same, in full batches and in short ones. Gradients are averaged
        # over processes, so each one's are made larger by their number.
        items = self.schedule.items(step)
        total = torch.zeros(2, device=accelerator.device)
        seen: list[tuple[Batch, torch.Tensor]] = []
        for number in range(settings.gradient_accumulation_steps):
            batch = next(batches)
            noise, timesteps = self.objective.draw(batch.latents.shape, random)
            last = number == settings.gradient_accumulation_steps - 1
            with learner.micro_batch(last=last):
                losses = self._losses(learner.network, batch, noise, timesteps)
                loss = losses.weighted.sum() / items
                learner.backward(loss * accelerator.num_processes)
            total += torch.stack([loss.detach(), losses.raw.detach().sum() / items])
            seen.append((batch, losses.raw.detach()))
        total = accelerator.reduce(total, reduction="sum")
        norm, queries = learner.clip()
        # One transfer from the device for all that is said of the step.
        loss_value, raw, norm_value, queries_value = torch.stack(
            [*total, norm, queries.to(norm.device)]
        ).tolist()
        # With fp16, the scaler skips steps whose gradients overflow, and lowers its scale.
        finite = accelerator.scaler is not None or math.isfinite(norm_value)
        if not (finite and math.isfinite(loss_value)):
            self._not_a_number(step, seen)
        learner.step()
        return _Step(loss_value, raw, norm_value, queries_value, rate)

    def _not_a_number(self, step: int, seen: Sequence[tuple[Batch, torch.Tensor]]) -> None:
        faulty = [
            index
            for batch, losses in seen
            for index, loss in zip(batch.indices, losses.tolist(), strict=True)
            if not math.isfinite(loss)
        ]
        batch = [index for each, _ in seen for index in each.indices]
        self._refuse_not_finite(batch)
        files = [self.caches.examples[index].latents.path for index in faulty or batch]
        who = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
        kept = checkpoint.find(self.layout.checkpoints, self.wanted)
        state = f"the checkpoint of step {kept[0].progress.step} is kept" if kept else ""
        mend = "set `mixed_precision` to bf16 or " if self.dtype == torch.float16 else ""
        raise TrainingError(
            f"the {'loss' if faulty else 'gradient'} is NaN or infinite at step {step}, for {who}",
            where=f"run {self.order.run}",
            mend=f"{mend}lower `learning_rate`; {state}".rstrip("; "),
        )

    def _refuse_not_finite(self, indices: Sequence[int]) -> None:
        """Name the cache files of some examples that hold NaN or infinite values, if any do."""
        if files := find_not_finite(self.caches, indices):
            more = f"; so does {', '.join(files[1:4])}" if len(files) > 1 else ""
            more += f" and {len(files) - 4} more" if len(files) > 4 else ""
            raise CacheError(f"holds NaN or infinite values{more}", where=files[0], mend=HINT)

    def _losses(
        self,
        model: objective.Network,
        batch: Batch,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
    ) -> objective.Losses:
        with self.learner.autocast(), attention(self.settings):
            return self.objective.losses(
                model,
                batch,
                noise,
                timesteps,
                device=self.accelerator.device,
                dtype=self.dtype,
            )

    def _probe(self, model: objective.Network) -> float:
        return objective.probe_loss(
            lambda *batch: self._losses(model, *batch).raw,
            self.caches,
            objective=self.objective,
            batch_size=self.settings.train_batch_size,
            seed=self.settings.seed,
        )

    def _draw_samples(self) -> None:
        if self.main:
            drawn = self.learner.alone(
                lambda model: self.sampler.draw(
                    model, device=self.accelerator.device, dtype=self.dtype
                )
            )
            sampling.write_row(self.layout.samples, self.step, drawn, self.wanted)
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if not self.main:
            return
        progress = checkpoint.Progress(
            wanted=self.wanted,
            step=self.step,
            loss_start=self.loss_start,
            seconds=self.seconds,
            history=self.history,
        )
        checkpoint.save(self.layout.checkpoints, progress, self.learner.state())
        keep = self.settings.checkpoints_total_limit
        checkpoint.prune(self.layout.checkpoints, self.wanted, keep, others=False)

    def _copy(self) -> None:
        """Write the trained weights as they are now, for use elsewhere."""
        if self.main:
            folder = self.layout.saved / f"step-{self.step:06d}"
            self.learner.write(network.write_copy, folder)
            atomic.write(folder / COPIED, self.wanted.model_dump_json().encode())
            _say(f"weights of step {self.step}: {folder}")

    def _finish(self) -> None:
        loss_end = self.learner.alone(self._probe)
        _say(f"loss at the end: {loss_end:.4f}, {self.loss_start:.4f} at the start")
        self.learner.write(network.write_trained, self.layout)
        record = Record(
            wanted=self.wanted,
            steps=self.steps,
            loss_start=self.loss_start,
            loss_end=loss_end,
            seconds=round(self.seconds, 3),
            history=self.history.points,
        )
        atomic.write(self.layout.record, (record.model_dump_json(indent=2) + "\n").encode())
        checkpoint.prune(self.layout.checkpoints, self.wanted, 1, others=True)


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.sd.train ORDER`; return the exit status."""
    diffusers.utils.logging.set_verbosity_error()
    try:
        Training(read_order(Path(arguments[0]), TrainingOrder)).run()
    except UserError as error:
        say_error(error)
        return 1
    except torch.OutOfMemoryError:
        memory = TrainingError(
            "the device has too little memory",
            mend="lower `train_batch_size` (and raise `gradient_accumulation_steps`), set "
            "`gradient_checkpointing: true` or `mixed_precision: bf16`",
        )
        say_error(memory)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
