"""Order of a training by `sd`."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.training.loop.order import TrainingOrder

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' own name
UNET_FOLDER = "unet"
UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' own name
PROJECTION_FOLDER = "text_projection"
KOHYA_WEIGHTS = "kohya.safetensors"
"""The LoRA once more, for A1111, Forge, ComfyUI and sd-scripts."""


class SdOrder(TrainingOrder):
    """Order of the trainer `sd`.

    Attributes:
        unet: the network that is trained.
        architecture: of the model, as it is configured.
        text_projection: None, `new`, or the path of a projection from the captions' width to the
            network's.
        scheduler: folder of the noise schedule; "" for that of the network's hub repository.
    """

    kind: Literal["sd"] = "sd"
    unet: Weights
    architecture: str | None = None
    text_projection: str | None = None
    scheduler: str
    trainer: SdTrainer

    @property
    def results(self) -> list[str]:
        """Path of the LoRA or of the UNet's weights below `output`."""
        lora = self.trainer.adapter == "lora"
        return [LORA_WEIGHTS if lora else f"{UNET_FOLDER}/{UNET_WEIGHTS}"]

    @property
    def from_hub(self) -> bool:
        """Whether UNet or VAE is named by a repository on the hub."""
        return bool(self.unet.hub) or super().from_hub

    def described(self) -> dict[str, JsonValue]:
        """Return the places of UNet, VAE and noise schedule."""
        return {
            "unet": self.unet.path or self.unet.hub,
            "vae": self.vae.path or self.vae.hub,
            "scheduler": self.scheduler,
        }
