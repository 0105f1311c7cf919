"""Training loop: optimizer steps over cached examples, checkpoints, samples, scalars.

The loop never loads a text encoder, and loads the VAE only to decode samples. A training that is
killed at any step and started again ends with the same weights: batches, noise and timesteps follow
from seed and step, and everything else is in the checkpoint.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from latentmake.base.errors import CacheError, TrainingError
from latentmake.base.progress import Progress, say
from latentmake.base.signals import signals_call
from latentmake.encode.encoders.device import download
from latentmake.runs.order import (
    COPIED,
    PROGRESS,
    Record,
    RunFiles,
    TrainedParts,
    write_parts,
    write_trained,
)
from latentmake.trainers import previous
from latentmake.trainers.loop import checkpoint
from latentmake.trainers.loop.caches import HINT, Batch, Caches, find_not_finite, read_items
from latentmake.trainers.loop.order import goes_on, sample_steps
from latentmake.trainers.loop.recipe import (
    BatchOrder,
    Part,
    Recipe,
    generator,
    make_accelerator,
    reseed,
    seed_of,
)
from latentmake.trainers.loop.samples import Samples
from latentmake.trainers.loop.state import Learner, load, prune, save

Unread = tuple[int, Callable[[], dict[str, float]], dict[str, float], str]
"""Step, function that waits for its scalars, further scalars, and items per second as text."""

_POLL = 1.0  # seconds between two checks for the file by which a user requests a copy
_NAMED = 4  # most files that a message names


def _add_scalars(writer: Any, step: int, values: Mapping[str, float]) -> None:
    """Write the scalars of a step as one event; one for each would cost as much as a small step."""
    summary = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    writer.file_writer.add_summary(Summary(value=summary), step)


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return f"{', '.join(files[:_NAMED])}{more}"


class Training:
    """A training, from order to weights.

    Attributes:
        steps: number of steps of the training.
        step: last completed step.
        saved: step of the training's newest checkpoint; 0 for none.
        main: whether this is the main process.
        several: whether there are several processes.
        held_out: caches of the held-out items, in the main process; else None.
        stop_requested: whether this process got a signal to stop.
        all_stop: whether all processes know that one of them got such a signal.
        interrupted: whether a signal came before the samples and held-out losses of `step`.
        loss_start: loss before the training.
        seconds: time spent on steps.

    Raises:
        UserError: caches, network or settings do not fit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.order = order = recipe.order
        self.settings = settings = order.trainer
        self.files = RunFiles(order)
        self.wanted = order.wanted()
        manifest = Path(order.manifest)
        weight = getattr(settings, "prior_loss_weight", 1.0)  # some trainers lack it
        items = read_items(manifest)
        self.caches = caches = Caches(items, recipe.tensors, prior_loss_weight=weight)
        self.accelerator = make_accelerator(settings, several=recipe.several)
        stored, device = caches.examples[0].latents, self.accelerator.device
        shown = order.sample_settings(), order.negative
        self.painter = recipe.painter(recipe, *shown, stored, device)
        self.objective, self.dtype = self.painter.objective, self.painter.dtype
        self.main = self.accelerator.is_main_process
        self.several = self.accelerator.num_processes > 1
        self.held_out: Caches | None = None
        if order.validates is not None and self.main:
            self.held_out = Caches(read_items(manifest, held_out=True), recipe.tensors)
        self.batch_order = BatchOrder(caches, settings, self.accelerator.num_processes)
        self.steps = int(order.length)
        if settings.epochs is not None:
            # Rounding keeps errors of floating point from adding a step.
            self.steps = max(1, math.ceil(round(settings.epochs / self.batch_order.epoch(1), 6)))
        if settings.step_limit is not None:
            self.steps = min(self.steps, settings.step_limit)
        network = recipe.make_network(
            channels=caches.channels, text_width=caches.text_width, dtype=self.dtype
        )
        if goes_on(order, self.wanted):
            recipe.read_copy(network, self.files.finished.results)
        self.learner = Learner(recipe, network, self.accelerator, steps=self.steps)
        self.painter.network = network
        self.step = 0
        self.saved = 0
        self.stop_requested = False
        self.all_stop = False
        self.interrupted = False
        self.loss_start = 0.0
        self.seconds = 0.0
        self.held_out_loss: float | None = None
        self.record = Record.of(order.product(self.wanted), seconds=0)

    def run(self) -> None:
        """Train from the newest checkpoint that fits, or from the start.

        Raises:
            UserError: a cache file is damaged, the disk is full, the loss is NaN or infinite.
        """
        if self.main:
            precision = self.settings.mixed_precision
            say(f"{self.learner.described()}; mixed_precision: {precision}")
        kept = self._resume()
        if not kept and self.main:
            self.loss_start = self._probe()
            if not math.isfinite(self.loss_start):
                self._refuse_not_finite(range(len(self.caches.examples)))
            say(f"loss at the start: {self.loss_start:.4f}")
        self.accelerator.wait_for_everyone()  # all processes have read the files that move now
        if self.main:
            results = self.recipe.results
            self.record = previous.begin(self.order, self.record, results, kept)
            if not kept:
                shutil.rmtree(self.files.logs, ignore_errors=True)
            self.samples = Samples(self.order, self.wanted, kept)
        steps_with_samples = sample_steps(self.order, self.steps)
        if self.main and not kept and self.step in steps_with_samples:
            self._draw_samples()
        self.accelerator.wait_for_everyone()
        noted = previous.noted(self.order, self.record) if self.main else nullcontext()
        with signals_call(self._stop), noted:
            self._steps(steps_with_samples)
            self.accelerator.wait_for_everyone()
            if self.main and self.saved != self.step:
                self._save()
        if self.main:
            self._finish()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def _resume(self) -> list[TrainedParts]:
        """Resume from the newest undamaged checkpoint that fits; return the parts of its training.

        On more devices, the same epochs have fewer steps, so a checkpoint of a shorter training may
        have more steps than this training; it is skipped.
        """
        for _, folder in checkpoint.folders(self.files.checkpoints):
            if checkpoint.Progress.read(folder / PROGRESS) is None:
                say(f"{folder} is damaged and skipped")
        for folder, progress in checkpoint.resumable(self.order, self.wanted):
            own = progress.parts == self.wanted
            if not own and progress.step > self.steps:
                continue
            state = load(folder, progress)
            if state is None:
                say(f"{folder} is damaged and skipped")
                continue
            self.learner.restore(state, folder)
            self.step, self.seconds = progress.step, progress.seconds
            self.loss_start = progress.loss_start
            self.saved = self.step if own else 0
            self.interrupted = own and progress.interrupted
            if self.main:
                shorter = "" if own else " of a shorter training"
                say(f"resumed from step {self.step}{shorter} ({folder})")
            return [progress.parts, self.wanted]
        return []

    def _steps(self, steps_with_samples: frozenset[int]) -> None:
        """Make all steps, with their checkpoints, copies, samples and held-out losses.

        The device computes a step while the CPU shows the scalars of the step before, because
        reading scalars waits for the device.
        """
        settings, first = self.settings, self.step + 1
        batches = self.caches.prefetched(
            self.batch_order.batches(self.accelerator.process_index, first, self.steps),
            threads=settings.dataloader_num_workers,
            pin=self.accelerator.device.type == "cuda",
        )
        writer: Any = None
        if self.main:
            writer = SummaryWriter(str(self.files.logs), purge_step=first)
        bar = Progress(
            total=self.steps,
            initial=self.step,
            unit="step",
            desc=self.order.run,
            disable=not self.main,
            file=sys.stderr,
        )
        seen, began, polled = 0, time.monotonic(), 0.0
        unread: deque[Unread] = deque()
        try:
            if self.step == 0 or self.interrupted:
                self._check(writer, draws=self.step > 0 and self.step in steps_with_samples)
                self._leave(stop=self._any_stop_requested())
            for step in range(first, self.steps + 1):
                clock = time.monotonic()
                read = self._one_step(step, batches)
                self._show(unread, writer, bar)
                self.step = step
                items, now = self.batch_order.items(step), time.monotonic()
                self.seconds += now - clock
                seen += items
                pace = {
                    "epoch": self.batch_order.epoch(step),
                    self.recipe.rate: items / (now - clock),
                }
                unread.append((step, read, pace, f"{seen / (now - began):.1f} items/s"))
                requested = False
                if self.main and now - polled > _POLL:
                    polled, requested = now, self.files.save.exists()
                    self.files.save.unlink(missing_ok=True)
                saves = self._due(step, settings.checkpointing_steps, settings.checkpoint_epochs)
                copies = self._due(step, settings.save_every_n_steps, settings.save_every_n_epochs)
                checks = self._validates or step in steps_with_samples
                stops = self.all_stop or (self.stop_requested and not self.several)
                if not (requested or saves or copies or checks or stops):
                    continue
                self._show(unread, writer, bar)  # it refuses a faulty step, which is then not saved
                self._check(writer, draws=step in steps_with_samples)
                if self.main and (requested or saves):
                    self._save()
                if self.main and (requested or copies):
                    self._copy()
                # Samples take long, so a signal may have come meanwhile: all processes ask here.
                self._leave(stop=stops or (checks and self._any_stop_requested()))
        finally:
            batches.close()
            bar.close()
            if self.main:
                writer.close()

    def _stop(self, _number: int) -> None:
        """Note a signal: the training ends after the current step, or amid samples."""
        self.stop_requested = True

    def _pause(self) -> None:
        """Raise KeyboardInterrupt after a signal.

        Samples and held-out losses call this. A resumed training makes them again.
        """
        if self.stop_requested:
            raise KeyboardInterrupt

    def _any_stop_requested(self) -> bool:
        """Whether any process got a signal to stop; all processes must call this together."""
        if not self.several:
            return self.stop_requested
        requests = torch.tensor(float(self.stop_requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(requests, reduction="sum").item() > 0)

    def _leave(self, *, stop: bool) -> None:
        """If `stop`, save the state and end this process by KeyboardInterrupt."""
        if not stop:
            return
        if self.main and self.step and self.saved != self.step:
            self._save()
        # A launcher kills the other processes once one has ended: let the main one save first.
        self.accelerator.wait_for_everyone()
        done = (
            f"at step {self.step} of {self.steps}, state saved; the same command goes on from there"
        )
        begun = done if self.step else "before the first step; the same command begins again"
        raise KeyboardInterrupt(f"stopped {begun}" if self.main else "")

    @property
    def _validates(self) -> bool:
        """Whether the loss of the held-out items is due at this step."""
        return self.step == self.steps or self.step % (self.order.validates or self.steps) == 0

    def _check(self, writer: Any, *, draws: bool) -> None:
        """Write the loss of the held-out items if it is due, and draw samples if `draws`."""
        self.interrupted = False
        try:
            if self.main and (draws or self._validates):
                self._pause()
                if self._validates:
                    self._validate(writer)
                writer.flush()
                if draws:
                    self._draw_samples()
        except KeyboardInterrupt:
            self.interrupted = True
        if draws:
            self.accelerator.wait_for_everyone()

    def _show(self, unread: deque[Unread], writer: Any, bar: Progress) -> None:
        """Show and write the scalars of unread steps; raises UserError if one is not finite."""
        while unread:
            step, read, pace, rate = unread.popleft()
            scalars = read()
            self.all_stop |= scalars.pop("stops") > 0
            bar.set_postfix_str(f"loss {scalars['loss']:.4f}, {rate}", refresh=False)
            bar.update()
            if self.main:
                _add_scalars(writer, step, scalars | pace)

    def _due(self, step: int, steps: int | None, epochs: int | None) -> bool:
        """Whether this step ends an interval of so many steps or epochs."""
        before, after = self.batch_order.epoch(step - 1), self.batch_order.epoch(step)
        if epochs is not None and math.floor(after / epochs) > math.floor(before / epochs):
            return True
        return steps is not None and step % steps == 0

    def _one_step(self, step: int, batches: Iterator[Batch]) -> Callable[[], dict[str, float]]:
        """Queue a step on the device, and return a function that waits for its scalars.

        The function raises a UserError if the loss or the gradient is NaN or infinite.
        """
        settings, accelerator, learner = self.settings, self.accelerator, self.learner
        process = accelerator.process_index
        reseed(seed_of(settings.seed, "step", step, process), accelerator.device)
        random = generator(settings.seed, "noise", step, process)
        rate = learner.rate
        # Every example has the same weight, in full and in short batches: the loss is divided by
        # the step's number of examples. Accelerate averages gradients over processes, so each
        # process multiplies its loss by their number.
        items = self.batch_order.items(step)
        total = torch.zeros(3, device=accelerator.device)
        total[2] = float(self.stop_requested)
        seen: list[tuple[Batch, torch.Tensor]] = []
        count = settings.gradient_accumulation_steps
        parts: Iterable[Part] = (
            (batch, *self.objective.draw(batch.latents.shape, random))
            for batch in islice(batches, count)
        )
        if not settings.lora_dropout:  # dropout masks are drawn in the original order
            parts = self.objective.in_turns(parts, step)
        for number, (batch, noise, timesteps) in enumerate(parts, 1):
            if batch.latents.is_pinned():
                noise, timesteps = noise.pin_memory(), timesteps.pin_memory()
            last = number == count
            # Only the last micro-batch synchronizes the gradients of all processes.
            with nullcontext() if last else accelerator.no_sync(learner.network):
                raw, weighted = self.painter.losses(learner.network, batch, noise, timesteps)
                loss = weighted.sum() / items
                accelerator.backward(loss * accelerator.num_processes)
            total[:2] += torch.stack([loss.detach(), raw.detach().sum() / items])
            seen.append((batch, raw.detach()))
        total = accelerator.reduce(total, reduction="sum")
        scalars = {"loss": total[0], "raw_loss": total[1], "stops": total[2], **learner.clip()}
        learner.step()
        wait = download([torch.stack([*scalars.values()])])  # one transfer for all scalars

        def read() -> dict[str, float]:
            values = dict(zip(scalars, wait()[0].tolist(), strict=True))
            # With fp16, an infinite gradient is no fault: the scaler skips the step and lowers its
            # scale.
            finite = accelerator.scaler is not None or math.isfinite(values["gradient_norm"])
            if not (finite and math.isfinite(values["loss"])):
                self._refuse_step(step, seen)
            return {**values, "learning_rate": rate}

        return read

    def _refuse_step(self, step: int, seen: Sequence[tuple[Batch, torch.Tensor]]) -> None:
        """Raise a UserError about a step whose loss or gradient is NaN or infinite.

        It names damaged cache files if there are any, else the examples of the step.
        """
        losses = [
            (index, math.isfinite(loss))
            for batch, values in seen
            for index, loss in zip(batch.indices, values.tolist(), strict=True)
        ]
        indices = [index for index, _ in losses]
        self._refuse_not_finite(indices)
        faulty = [index for index, finite in losses if not finite]
        files = [self.caches.examples[index].latents.path for index in faulty or indices]
        kept = checkpoint.find(self.files.checkpoints, self.wanted)
        state = f"; the checkpoint of step {kept[0][1].step} is kept" if kept else ""
        precision = "set `mixed_precision` to bf16 or " if self.dtype == torch.float16 else ""
        raise TrainingError(
            f"the {'loss' if faulty else 'gradient'} is NaN or infinite at step {step}, for "
            f"{_listed(files)}",
            where=f"run {self.order.run}",
            hint=f"{precision}lower `learning_rate`{state}",
        )

    def _refuse_not_finite(self, indices: Sequence[int]) -> None:
        """Raise a CacheError if cache files of these examples hold NaN or infinite values."""
        if files := find_not_finite(self.caches, indices):
            more = f"; so does {_listed(files[1:])}" if len(files) > 1 else ""
            raise CacheError(f"holds NaN or infinite values{more}", where=files[0], hint=HINT)

    def _validate(self, writer: Any) -> None:
        """Write the loss of the held-out items, if there are any, in the main process."""
        if (held_out := self.held_out) is not None:
            means = self.learner.outside_training(
                lambda: self.painter.held_out_losses(held_out, self._pause)
            )
            _add_scalars(writer, self.step, means)
            self.held_out_loss = means["validation_loss"]

    def _probe(self) -> float:
        """Return the mean loss over a fixed set of examples, with the network as it is now."""
        return self.learner.outside_training(lambda: self.painter.probe_loss(self.caches))

    def _draw_samples(self) -> None:
        self.painter.is_trained = self.step > 0
        self.samples.draw(self.step, self._pictures, self.painter)

    def _pictures(self) -> Iterator[torch.Tensor]:
        """Draw all samples, then yield their latents one by one for decoding."""
        for latents in self.learner.outside_training(self._sampled):
            self._pause()  # decoding a sample takes long on a CPU
            yield latents

    def _sampled(self) -> list[torch.Tensor]:
        """Return the latents of all samples, drawn with the network as it is now."""
        size, seed = self.painter.settings.size, self.settings.samples.seed
        samples: list[torch.Tensor] = []
        seen: Counter[str] = Counter()  # equal prompts get different noise
        for prompt in self.order.prompts:
            noise = seed_of(seed, "sample", prompt.prompt, seen[prompt.prompt])
            samples.append(self.painter.latents(prompt.text, noise, size, self._pause, None))
            seen[prompt.prompt] += 1
        return samples

    def _save(self) -> None:
        """Write a checkpoint, and remove old ones."""
        progress = checkpoint.Progress(
            parts=self.wanted,
            step=self.step,
            loss_start=self.loss_start,
            seconds=self.seconds,
            course=self.order.course_digest(),
            length=self.order.length,
            limit=self.settings.step_limit,
            interrupted=self.interrupted,
        )
        folder = self.files.checkpoints
        save(folder, progress, self.learner.state())
        self.saved = self.step
        prune(folder, self.wanted, self.settings.checkpoints_total_limit)

    def _copy(self) -> None:
        """Write a copy of the trained weights as they are now, for the user."""
        folder = self.files.saved / f"step-{self.step:06d}"
        self._write(folder)
        write_parts(folder / COPIED, self.wanted)
        say(f"weights of step {self.step}: {folder}")

    def _write(self, folder: Path) -> None:
        with self.learner.averaged():
            self.recipe.write_copy(self.learner.denoiser, folder, self.record, self.step)

    def _finish(self) -> None:
        """Write curves, trained weights and their record; remove all checkpoints but the newest."""
        self.samples.show()
        loss_end = self._probe()
        say(f"loss at the end: {loss_end:.4f}, {self.loss_start:.4f} at the start")
        device = self.accelerator.device
        figures: dict[str, object] = {
            "steps": self.steps,
            "loss_start": self.loss_start,
            "loss_end": loss_end,
            "seconds": round(self.seconds, 3),
            "mixed_precision": self.settings.mixed_precision,
            "held_out": self.held_out_loss,
        }
        if device.type == "cuda":
            figures["memory"] = torch.cuda.max_memory_allocated(device)
        record = self.record.model_copy(update=figures)
        write_trained(self._write, record, self.files, self.recipe.results)
        prune(self.files.checkpoints, self.wanted, 1, others=True)
