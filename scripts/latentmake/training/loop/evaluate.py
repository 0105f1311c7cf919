"""Losses of items that did not train, at noise and timesteps that are fixed by their keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from latentmake.errors import CacheError, TrainingError
from latentmake.files import cachefile
from latentmake.training.evaluation import TIMESTEPS
from latentmake.training.loop.batch_order import generator
from latentmake.training.loop.data.caches import Caches, Item, find_not_finite, read_items
from latentmake.training.loop.data.headers import HINT
from latentmake.training.loop.objective import Objective
from latentmake.training.loop.recipe import Network, Recipe


class Case(NamedTuple):
    """One held-out item at one resolution, of a video its first clip.

    Attributes:
        number: of its example in the caches.
        latents: path of the cache file.
        text: likewise.
        latents_key: digest of all that shaped them.
        text_key: likewise.
    """

    number: int
    item: Item
    resolution: str
    latents: str
    text: str
    latents_key: str
    text_key: str

    @property
    def name(self) -> str:
        """Dataset, stem and resolution."""
        return f"{self.item.dataset}/{self.item.stem} {self.resolution}"


def cases_of(recipe: Recipe) -> tuple[list[Case], Caches]:
    """Return the held-out items of a run and their caches.

    Raises:
        UserError: the manifest or a cache file is damaged.
    """
    items = []
    for item in read_items(Path(recipe.order.manifest), held_out=True):
        first = {
            name: paths if isinstance(paths, str) else paths[:1]
            for name, paths in item.latents.items()
            if paths
        }
        items.append(item.model_copy(update={"latents": first}))
    caches = Caches(items, recipe.tensors)
    found = [
        Case(index, item, name, *pair, _key(pair[0]), _key(pair[1]))
        for index, (item, name, pair) in enumerate(_named(items))
    ]
    return found, caches


def _named(items: Sequence[Item]) -> Iterator[tuple[Item, str, tuple[str, str]]]:
    """Yield items with the name of a resolution and its pair of cache files, in `pairs`' order."""
    for item in items:
        yield from zip([item] * len(item.latents), sorted(item.latents), item.pairs(), strict=True)


def _key(path: str) -> str:
    try:
        return cachefile.read_header(path).key
    except OSError as error:
        what = f"this cache file cannot be read ({error.strerror})"
        raise CacheError(what, where=path, hint=HINT) from None


def timesteps_of(objective: Objective) -> torch.Tensor:
    """Return the timesteps [10] of an evaluation: in the middle of ten equal shares."""
    return objective.at((torch.arange(TIMESTEPS) + 0.5) / TIMESTEPS)


@torch.no_grad()
def losses_of(
    objective: Objective,
    network: Network,
    caches: Caches,
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[float]:
    """Yield an item's loss at each of `timesteps_of`.

    The noise follows from the key of its latents and the number of the timestep: it is the same for
    every network, and for whatever else is held out.

    Raises:
        CacheError: a cache file holds NaN or infinite values.
        TrainingError: the network's prediction is NaN or infinite.
    """
    batch = caches.batch([case.number])
    for number, timestep in enumerate(timesteps_of(objective)):
        random = generator("evaluation", case.latents_key, number)
        noise = torch.randn(batch.latents.shape, generator=random)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            found = objective.losses(
                network, batch, noise, timestep[None], device=device, dtype=dtype
            )
        loss = float(found.raw)
        if not math.isfinite(loss):
            _refuse(caches, case)
        yield loss


def _refuse(caches: Caches, case: Case) -> None:
    if damaged := find_not_finite(caches, [case.number]):
        raise CacheError("holds values that are NaN or infinite", where=damaged[0], hint=HINT)
    raise TrainingError(
        "the loss is NaN or infinite",
        where=case.name,
        hint="look at the training's loss, and at the weights of the network",
    )
