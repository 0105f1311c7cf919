"""Parts that rows of musubi-tuner's architectures share; see `config.musubi`."""

from __future__ import annotations

from collections.abc import Mapping

from latentmake.config.scripts import File, Vae, Version

__all__ = ["DIT", "FIRST", "I2V", "LATENTS_16", "TEXT", "VAE", "VIDEO", "shift"]

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


def shift(value: float) -> Mapping[str, object]:
    """Return the trainer's settings for timesteps that are shifted by a value."""
    return {"timestep_sampling": "shift", "discrete_flow_shift": value}
