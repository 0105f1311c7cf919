"""Tensors that trainings read from the cache files of each layout."""

from __future__ import annotations

from typing import NamedTuple

from latentmake.layouts import plain
from latentmake.training.loop.data.headers import Sought


class CacheTensors(NamedTuple):
    """The tensors of an example.

    Attributes:
        latents: [channels, height, width], or [channels, frames, height, width].
        text: [tokens, width].
        more: further tensors in the file of the latents, by the name that a batch gives them.
    """

    latents: Sought
    text: Sought
    more: tuple[tuple[str, Sought], ...] = ()


PLAIN = CacheTensors(Sought(plain.LATENTS, 3, scaled=True), Sought(plain.hidden_state(0), 2))

WAN = CacheTensors(
    Sought("latents", 4, pattern=r"latents_\d+x\d+x\d+_\w+"),
    Sought("varlen_t5", 2, pattern=r"varlen_t5_\w+"),
)
"""Of musubi-tuner's caches, whose latents are scaled already."""
