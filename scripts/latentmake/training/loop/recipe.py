"""Recipe of a training: what the loop asks of the network it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from latentmake.training.loop.caches import CacheTensors, Stored
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


class Recipe:
    """Network, objective, samples and written files of a training; a trainer has its own.

    Attributes:
        results: names of all files and folders that a training of this kind may leave in its
            output folder, of which one without the others belongs to an older training.
        probes: examples of the loss at the start and at the end.
        rate: scalar of the items trained on in a second.
        several: whether a step may leave some trained weights without gradients.
        tensors: what it reads of cache files.
        alpha: scale of the LoRA; None where none is trained.
        make_objective: returns noise, timesteps and loss; raises ModelError where they do not fit
            the network.
        make_network: returns the network as a training begins with it, the same each time, from
            `channels` of the latents, `text_width` of the captions' embeddings and the `dtype` of
            frozen weights; raises UserError where network, caches and settings do not fit.
        make_sampler: returns the sampler of a training; a cache file's latents have their scale and
            size.
        make_decoder: loads the VAE, and returns what makes a file's content of a sample's latents;
            that is None where memory does not suffice, even in tiles.
        write_copy: writes the trained weights into a folder of their own; one of that name is
            replaced.
        read_copy: puts back the weights of such a folder; raises TrainingError where they are
            missing or damaged, or of another network.
    """

    results: ClassVar[tuple[str, ...]]
    probes: ClassVar[int] = 64
    rate: ClassVar[str] = "images_per_second"
    several: bool = False
    order: TrainingOrder
    tensors: CacheTensors
    alpha: float | None
    make_objective: Callable[[], Objective]
    make_network: Callable[..., Network]
    make_sampler: Callable[[Any, Stored], Sampler]
    make_decoder: Callable[[torch.device], Callable[[torch.Tensor], bytes | None]]
    write_copy: Callable[[Network, Path], None]
    read_copy: Callable[[Network, Path], None]

    def __init__(self, order: Any) -> None:
        self.order = order
