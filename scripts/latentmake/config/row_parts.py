"""Parts that rows of musubi-tuner's architectures share; see `config.musubi`."""

from __future__ import annotations

from collections.abc import Mapping

from latentmake.config.scripts import File, Setting, Vae, Version

VAE = File("--vae", "vae", kind="VAE", vae=Vae(3, 16))
DIT = File("--dit", "dit")
TEXT = File("--text_encoder", "text", kind="language model")
VIDEO = Version(videos=True)
"""A version without arguments of its own, for images and videos."""
LATENTS_16 = {"latents": 16, "latents_control": 16}
"""Channels of most VAEs."""
I2V = ("--i2v",)
FIRST = ("latents_image_",)
"""Tensors of the first frame."""


def shift(value: float) -> Mapping[str, Setting]:
    """Return the trainer's settings for timesteps that are shifted by a value."""
    return {"timestep_sampling": "shift", "discrete_flow_shift": value}


def guide(learning_rate: float, **others: Setting) -> Mapping[str, Setting]:
    """Return the trainer's settings that the commands of musubi-tuner's guides have.

    Most name no alpha: the scripts' own is 1. None is the rank.
    """
    rank: dict[str, Setting] = {"network_dim": 32, "network_alpha": 1.0}
    rest: dict[str, Setting] = {"gradient_checkpointing": True, "seed": 42}
    return {"learning_rate": learning_rate, **rank, **rest, **others}
