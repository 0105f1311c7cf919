"""The network that learns, with all that changes from step to step: optimiser, rate, average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.training_utils import EMAModel

from latentmake.errors import TrainingError
from latentmake.training.order import TrainingOrder
from latentmake.training.sd import network
from latentmake.training.sd.accelerator import set_up
from latentmake.training.sd.batch_order import seed_of
from latentmake.training.sd.checkpoint import State
from latentmake.training.sd.data.caches import Caches
from latentmake.training.sd.engine import make_engine
from latentmake.training.sd.objective import Network
from latentmake.training.sd.optimizers import (
    Hyperparameters,
    effective_rate,
    make_optimizer,
    make_rates,
)
from latentmake.training.sd.scalars import queries_and_keys

__all__ = ["Learner", "make_denoiser"]

Result = TypeVar("Result")


def make_denoiser(
    order: TrainingOrder, *, channels: int, text_width: int, dtype: torch.dtype
) -> network.Denoiser:
    """Return the network as a training begins with it, the same each time.

    Args:
        order: of the training.
        channels: of the latents.
        text_width: of the captions' embeddings.
        dtype: in what the network computes.

    Raises:
        ModelError: network, projection and caches do not fit.
        TrainingError: the settings name what is not there.
    """
    settings, where = order.trainer, order.unet.path or order.unet.hub or ""
    unet = network.load_unet(order.unet)
    network.check_latents(unet, channels, where)
    torch.manual_seed(seed_of(settings.seed, "network"))
    projection = network.make_projection(unet, order.text_projection, text_width, where)
    denoiser = network.Denoiser(unet, projection)
    network.adapt(denoiser, settings, dtype)
    set_up(unet, settings)
    return denoiser


class Learner:
    """A network in training.

    Args:
        order: of the training.
        caches: what it is trained on.
        accelerator: accelerate's.
        steps: how many there will be.
        dtype: in what the network computes.

    Attributes:
        denoiser: the network itself.
        network: the same, as accelerate wraps it.
        parameters: those that are trained.
        engine: makes steps of gradients.

    Raises:
        ModelError: network, projection and caches do not fit.
        TrainingError: the settings name what is not there.
    """

    def __init__(
        self,
        order: TrainingOrder,
        caches: Caches,
        accelerator: Any,
        *,
        steps: int,
        dtype: torch.dtype,
    ) -> None:
        settings = order.trainer
        self.denoiser = make_denoiser(
            order, channels=caches.channels, text_width=caches.text_width, dtype=dtype
        )
        self.denoiser.train()
        self.parameters = [each for each in self.denoiser.parameters() if each.requires_grad]
        optimizer = make_optimizer(self.parameters, settings)
        self.rates = make_rates(optimizer, settings, steps)
        self._hyperparameters = Hyperparameters(optimizer, self.rates)
        self._accelerator = accelerator
        self._optimizer_name = settings.optimizer
        self._lora = settings.adapter == "lora"
        self._alpha = float(settings.alpha or settings.rank)
        self._decay = settings.ema_decay
        self.engine = make_engine(
            accelerator,
            self.denoiser,
            optimizer,
            parameters=self.parameters,
            queries_and_keys=queries_and_keys(self.denoiser.named_parameters()),
            settings=settings,
        )
        self.network, self.optimizer = self.engine.network, self.engine.optimizer
        self._average: Any = None  # diffusers has no types
        if settings.ema_decay is not None:
            self._average = EMAModel(self.parameters, decay=settings.ema_decay, foreach=True)

    @property
    def rate(self) -> float:
        """The learning rate of the step to come."""
        return effective_rate(self.optimizer)

    def learn(self) -> None:
        """Make a step by the gradients that are there, and forget them."""
        self.engine.step()
        self.rates.step()
        if self._average is not None:
            self._average.step(self.parameters)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average, where there is one, in the place of the weights."""
        if self._average is None:
            yield
            return
        self._average.store(self.parameters)
        self._average.copy_to(self.parameters)
        try:
            yield
        finally:
            self._average.restore(self.parameters)

    def alone(self, work: Callable[[Network], Result]) -> Result:
        """Do something with the network outside of the training, in the main process alone."""
        self.denoiser.eval()
        try:
            with torch.no_grad(), self.averaged(), self.engine.autocast():
                return work(self.denoiser)
        finally:
            self.denoiser.train()

    def state(self) -> State:
        """Return what a checkpoint holds; where the engine is `collective`, all processes call."""
        scaler = self._accelerator.scaler
        return network.trained_state(self.denoiser), {
            "optimizer_name": self._optimizer_name,
            "alpha": self._alpha if self._lora else None,
            "optimizer": self.engine.optimizer_state(),
            "learning_rate": self.rates.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def restore(self, state: State, where: Path) -> None:
        """Go back to what `state` returned, with this training's own hyperparameters.

        Args:
            state: of a checkpoint.
            where: its folder, for messages.

        Raises:
            TrainingError: it is of another network or optimiser.
        """
        weights, rest = state
        scaler = self._accelerator.scaler
        try:
            network.load_trained(self.denoiser, weights)
            if (name := rest["optimizer_name"]) != self._optimizer_name:
                raise ValueError(f"{name} in place of {self._optimizer_name}")
            self.engine.restore(rest["optimizer"])
            self.rates.load_state_dict(rest["learning_rate"])
            self._hyperparameters.restore()
            if (self._average is None) != (rest["average"] is None):
                raise ValueError("only one of the two has an `ema_decay`")
            if self._average is not None:
                self._average.load_state_dict(rest["average"])
                self._average.decay = self._decay
                self._average.to(self._accelerator.device)
            if scaler is not None and rest["scaler"] is not None:
                scaler.load_state_dict(rest["scaler"])
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise TrainingError(
                f"this checkpoint is of another network or optimiser ({error})",
                where=where,
                mend="train with the settings it was made with, or leave it out",
            ) from None
        # Checkpoints of the first release do not say it.
        if self._lora and (alpha := rest.get("alpha")) not in (None, self._alpha):
            raise TrainingError(
                f"this checkpoint's LoRA was trained with alpha {alpha:g}, and would be another "
                f"network with {self._alpha:g}",
                where=where,
                mend=f"set the trainer's `alpha` to {alpha:g}",
            )

    def write(self, write: Callable[..., None], to: object) -> None:
        """Write the trained weights, averaged, by one of `network`'s functions."""
        with self.averaged():
            write(self.denoiser, to, lora=self._lora)
