"""Recipe of a training: what the loop asks of the network it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from latentmake.training.loop.data.caches import CacheTensors, Stored
from latentmake.training.loop.objective import Objective
from latentmake.training.loop.order import TrainingOrder

Network: TypeAlias = Any  # a torch.nn.Module whose call is a matter of its recipe
Drawn = dict[str, torch.Tensor]
"""Keys of samples (`TrainingOrder.picture_keys`), and their latents, unscaled."""


class Sampler(ABC):
    """Settings and embeddings of the samples drawn along a training."""

    @abstractmethod
    def draw(
        self,
        network: Network,
        keys: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Drawn:
        """Draw the samples of these keys; float32, on the CPU."""


class Recipe(ABC):
    """Network, objective, samples and written files of a training.

    Attributes:
        tensors: what it reads of cache files.
        results: names of all files and folders that a training of this kind may leave in its
            output folder, of which one without the others belongs to an older training.
        probes: examples of the loss at the start and at the end.
        rate: scalar of the items trained on in a second.
        memory_hint: repair where a device has too little memory.
        several: whether a step may leave some trained weights without gradients.
        alpha: scale of the LoRA; None where none is trained.
        order_type: class of its orders.
    """

    tensors: CacheTensors
    results: ClassVar[tuple[str, ...]]
    probes: ClassVar[int] = 64
    rate: ClassVar[str] = "images_per_second"
    memory_hint: ClassVar[str]
    several: bool = False
    alpha: float | None
    order_type: ClassVar[type[TrainingOrder]]
    order: TrainingOrder

    @abstractmethod
    def __init__(self, order: Any) -> None:
        """Return the recipe of an order."""

    @abstractmethod
    def make_objective(self) -> Objective:
        """Return noise, timesteps and loss; raises ModelError where they do not fit the network."""

    @abstractmethod
    def make_network(self, *, channels: int, text_width: int, dtype: torch.dtype) -> Network:
        """Return the network as a training begins with it, the same each time.

        Args:
            channels: of the latents.
            text_width: of the captions' embeddings.
            dtype: of the frozen weights under a LoRA.

        Raises:
            UserError: network, caches and settings do not fit.
        """

    @abstractmethod
    def make_sampler(self, objective: Objective, latents: Stored) -> Sampler:
        """Return the sampler of a training; `latents` of a cache file have its scale and size."""

    @abstractmethod
    def make_decoder(self, device: torch.device) -> Callable[[torch.Tensor], bytes | None]:
        """Load the VAE; return what makes a file's content of a sample's latents.

        That is None where memory does not suffice, even in tiles.
        """

    @abstractmethod
    def write_copy(self, network: Network, folder: Path) -> None:
        """Write the trained weights into a folder of their own; one of that name is replaced."""

    def complete(self) -> None:
        """Write the `TrainingOrder.copies` of a finished training that are missing."""
        raise NotImplementedError

    @abstractmethod
    def read_copy(self, network: Network, folder: Path) -> None:
        """Put back the weights that `write_copy` wrote into a folder.

        Raises:
            TrainingError: they are missing or damaged, or of another network.
        """
