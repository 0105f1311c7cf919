"""The trainer `sd`: Stable Diffusion 1.x and 2.x, a LoRA or the whole UNet, from caches alone.

`accelerate launch -m latentmake.trainers.sd ORDER`. This process never loads a VAE or a text
encoder. Killed at any step and started again, it ends with the same weights: batches, noise and
timesteps follow from seed and step, all else is in the checkpoint.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate.accelerator import Accelerator
from diffusers.optimization import get_scheduler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from latentmake import cachefile, recipe
from latentmake.errors import TrainingError, UserError
from latentmake.trainers import checkpoint, network, objective, sampling
from latentmake.trainers.data import Batch, Caches, prefetched, read_items, read_scale, read_text
from latentmake.trainers.order import TrainingOrder, read_order
from latentmake.trainers.record import (
    History,
    Layout,
    Record,
    sample_steps,
    wanted,
)
from latentmake.trainers.schedule import Schedule, generator, seed_of

__all__ = ["Training", "main"]

_FORMATS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PIXELS = 8.0  # a latent's width in pixels, where nothing says; that of all Stable Diffusions


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


def _accelerator(precision: str) -> Any:
    try:
        accelerator: Any = Accelerator(mixed_precision=precision)
    except ValueError as error:
        raise TrainingError(
            f"this machine does not compute in {precision} ({error})",
            where="trainer.mixed_precision",
            mend="set it to `no`",
        ) from None
    kind = str(accelerator.distributed_type.value)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise TrainingError(
            f"the sd trainer does not work under {kind}",
            where="trainer.accelerate_config",
            mend="choose one machine or plain multi-GPU in `accelerate config`",
        )
    return accelerator


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
        self.noise_schedule = objective.load_noise_schedule(
            Path(order.scheduler), self.settings.prediction_type
        )
        self.accelerator = _accelerator(self.settings.mixed_precision)
        self.dtype = _FORMATS[self.settings.mixed_precision]
        self.main = self.accelerator.is_main_process
        self.schedule = Schedule(
            [each.shape for each in self.caches.examples],
            [each.repeats for each in self.caches.examples],
            batch_size=self.settings.train_batch_size,
            seed=self.settings.seed,
            accumulation=self.settings.gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
        )
        self._load_network()
        self._make_sampler()
        self.step = 0
        self.loss_start = 0.0
        self.seconds = 0.0
        self.history = History()

    def _load_network(self) -> None:
        settings = self.settings
        unet = network.load_unet(self.order.unet)
        network.check(
            unet,
            channels=self.caches.channels,
            text_width=self.caches.text_width,
            where=self.order.unet.path or self.order.unet.hub or "",
        )
        torch.manual_seed(seed_of(settings.seed, "network"))
        network.adapt(unet, settings, self.dtype)
        unet.train()
        self.unet = unet
        self.parameters = [each for each in unet.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.rates = get_scheduler(
            settings.lr_scheduler,
            optimizer,
            num_warmup_steps=settings.lr_warmup_steps,
            num_training_steps=settings.steps,
        )
        self.network, self.optimizer = self.accelerator.prepare(unet, optimizer)

    def _make_sampler(self) -> None:
        order, samples = self.order, self.settings.samples
        self.scale = read_scale(self.caches.examples[0].latents)
        pixels = self.scale.pixels or recipe.vae_factor(order.vae) or _PIXELS
        width, height = (max(1, round(side / pixels)) for side in order.sample_size)
        self.sampler = sampling.Sampler(
            self.noise_schedule,
            [read_text(Path(prompt.text)) for prompt in order.prompts],
            None if order.negative is None else read_text(Path(order.negative)),
            shape=(self.caches.channels, height, width),
            steps=samples.num_inference_steps,
            guidance=samples.guidance_scale,
            seed=samples.seed,
            batch=self.settings.train_batch_size,
        )

    def run(self) -> None:
        """Train, from the newest checkpoint of this very training or from the start.

        Raises:
            UserError: a cache file is damaged, the disk is full, the loss is no number.
        """
        self._resume()
        if self.step == 0 and self.main:
            sampling.clear_rows(self.layout.samples)
            shutil.rmtree(self.layout.scalars, ignore_errors=True)
            self.loss_start = self._alone(self._probe)
            _say(f"loss at the start: {self.loss_start:.4f}")
        steps_with_samples = sample_steps(self.order)
        if self.step == 0 and 0 in steps_with_samples:
            self._draw_samples()
        self.accelerator.wait_for_everyone()
        self._steps(steps_with_samples)
        self.accelerator.wait_for_everyone()
        if self.main:
            self._finish()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def _resume(self) -> None:
        for found in checkpoint.find(self.layout.checkpoints, self.wanted):
            loaded = checkpoint.load(found)
            if loaded is None:
                _say(f"{found.folder} is damaged and left aside")
                continue
            weights, state = loaded
            try:
                network.load_trained(self.unet, weights)
                self.optimizer.load_state_dict(state["optimizer"])
                self.rates.load_state_dict(state["learning_rate"])
                if self.accelerator.scaler is not None and state["scaler"] is not None:
                    self.accelerator.scaler.load_state_dict(state["scaler"])
            except (ValueError, KeyError, RuntimeError) as error:
                raise TrainingError(
                    f"this checkpoint does not fit the network ({error})",
                    where=found.folder,
                    mend="delete it, and give the same command again",
                ) from None
            progress = found.progress
            self.step, self.loss_start = progress.step, progress.loss_start
            self.seconds, self.history = progress.seconds, progress.history
            if self.main:
                _say(f"going on from step {self.step} ({found.folder})")
                sampling.clear_rows(self.layout.samples, self.wanted)
            return

    def _steps(self, steps_with_samples: frozenset[int]) -> None:
        settings, process = self.settings, self.accelerator.process_index
        first = self.step + 1
        batches = prefetched(self.caches, self.schedule.batches(process, first, settings.steps))
        writer = self._writer(first) if self.main else None
        bar = tqdm(
            total=settings.steps,
            initial=self.step,
            unit="step",
            desc=self.order.run,
            disable=not self.main,
            file=sys.stderr,
        )
        seen, began = 0, time.monotonic()
        try:
            for step in range(first, settings.steps + 1):
                clock = time.monotonic()
                loss, norm, rate = self._one_step(step, lambda: next(batches))
                self.step = step
                self.history.add(step, loss, settings.steps)
                self.seconds += time.monotonic() - clock
                seen += self.schedule.items(step)
                pace = seen / (time.monotonic() - began)
                bar.set_postfix_str(f"loss {loss:.4f}, {pace:.1f} items/s", refresh=False)
                bar.update()
                if writer is not None:
                    writer.add_scalar("loss", loss, step)
                    writer.add_scalar("learning_rate", rate, step)
                    writer.add_scalar("gradient_norm", norm, step)
                    writer.add_scalar("epoch", self.schedule.epoch(step), step)
                if step in steps_with_samples:
                    self._draw_samples()
                if step % settings.checkpointing_steps == 0:
                    if writer is not None:
                        writer.flush()
                    self._save()
        finally:
            batches.close()
            bar.close()
            if writer is not None:
                writer.close()

    def _writer(self, first: int) -> Any:
        # What a killed training wrote after its last checkpoint is drawn anew.
        return SummaryWriter(str(self.layout.scalars), purge_step=first)

    def _one_step(self, step: int, next_batch: Callable[[], Batch]) -> tuple[float, float, float]:
        """Return loss, gradient norm and learning rate of a step."""
        settings, accelerator = self.settings, self.accelerator
        process = accelerator.process_index
        torch.manual_seed(seed_of(settings.seed, "step", step, process))
        random = generator(settings.seed, "noise", step, process)
        rate = float(self.rates.get_last_lr()[0])
        # Every example counts the same, in full batches and in short ones. Gradients are averaged
        # over processes, so each one's are made larger by their number.
        items = self.schedule.items(step)
        total = torch.zeros((), device=accelerator.device)
        for number in range(settings.gradient_accumulation_steps):
            batch = next_batch()
            noise, timesteps = objective.draw_noise(
                batch.latents.shape, int(self.noise_schedule.config.num_train_timesteps), random
            )
            last = number == settings.gradient_accumulation_steps - 1
            with nullcontext() if last else accelerator.no_sync(self.network):
                loss = self._losses(self.network, batch, noise, timesteps).sum() / items
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        loss_value = float(accelerator.reduce(total, reduction="sum"))
        norm = float(accelerator.clip_grad_norm_(self.parameters, settings.max_grad_norm))
        # With fp16, the scaler skips steps whose gradients overflow, and lowers its scale.
        finite = accelerator.scaler is not None or torch.isfinite(torch.tensor(norm))
        if not (finite and torch.isfinite(torch.tensor(loss_value))):
            self._not_a_number(step)
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_value, norm, rate

    def _not_a_number(self, step: int) -> None:
        kept = checkpoint.find(self.layout.checkpoints, self.wanted)
        state = f"the checkpoint of step {kept[0].progress.step} is kept" if kept else ""
        mend = "set `mixed_precision` to bf16 or " if self.dtype == torch.float16 else ""
        raise TrainingError(
            f"the loss is no number any more at step {step}",
            where=f"run {self.order.run}",
            mend=f"{mend}lower `learning_rate`; {state}".rstrip("; "),
        )

    def _losses(
        self,
        model: objective.Network,
        batch: Batch,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
    ) -> torch.Tensor:
        with self.accelerator.autocast():
            return objective.item_losses(
                model,
                self.noise_schedule,
                batch,
                noise,
                timesteps,
                device=self.accelerator.device,
                dtype=self.dtype,
            )

    def _alone(self, work: Callable[[objective.Network], Any]) -> Any:
        """Do something with the network outside of the training, in the main process alone."""
        model = self.accelerator.unwrap_model(self.network)
        model.eval()
        try:
            with torch.no_grad(), self.accelerator.autocast():
                return work(model)
        finally:
            model.train()

    def _probe(self, model: objective.Network) -> float:
        return objective.probe_loss(
            lambda batch, noise, timesteps: self._losses(model, batch, noise, timesteps),
            self.caches,
            timesteps=int(self.noise_schedule.config.num_train_timesteps),
            batch_size=self.settings.train_batch_size,
            seed=self.settings.seed,
        )

    def _draw_samples(self) -> None:
        if self.main:
            latents = self._alone(
                lambda model: self.sampler.draw(
                    model, device=self.accelerator.device, dtype=self.dtype
                )
            )
            sampling.write_row(
                self.layout.samples,
                sampling.Row(self.step, latents / self.scale.scaling + self.scale.shift),
                self.wanted,
                scaling_factor=self.scale.scaling,
                shift_factor=self.scale.shift,
            )
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.main:
            scaler = self.accelerator.scaler
            checkpoint.save(
                self.layout.checkpoints,
                checkpoint.Progress(
                    wanted=self.wanted,
                    step=self.step,
                    loss_start=self.loss_start,
                    seconds=self.seconds,
                    history=self.history,
                ),
                network.trained_state(self.unet),
                {
                    "optimizer": self.optimizer.state_dict(),
                    "learning_rate": self.rates.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                },
            )
            keep = self.settings.checkpoints_total_limit
            checkpoint.prune(self.layout.checkpoints, self.wanted, keep, others=False)
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        loss_end = self._alone(self._probe)
        _say(f"loss at the end: {loss_end:.4f}, {self.loss_start:.4f} at the start")
        network.write_trained(self.unet, self.layout, full=self.settings.adapter == "full")
        record = Record(
            wanted=self.wanted,
            steps=self.settings.steps,
            loss_start=self.loss_start,
            loss_end=loss_end,
            seconds=round(self.seconds, 3),
            history=self.history.points,
        )
        cachefile.write(self.layout.record, (record.model_dump_json(indent=2) + "\n").encode())
        checkpoint.prune(self.layout.checkpoints, self.wanted, 1, others=True)


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.trainers.sd ORDER`; return the exit status."""
    diffusers.utils.logging.set_verbosity_error()
    try:
        Training(read_order(Path(arguments[0]), TrainingOrder)).run()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except torch.OutOfMemoryError:
        memory = TrainingError(
            "the device has too little memory",
            mend="lower `train_batch_size` (and raise `gradient_accumulation_steps`), set "
            "`gradient_checkpointing: true` or `mixed_precision: bf16`",
        )
        sys.stderr.write(f"error: {memory}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
