"""Settings of the trainer `sd`, our own for Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from latentmake.config.fields import UNET_PART, Real
from latentmake.config.trainers.loop import LoopTrainer

UNetPart = Annotated[str, StringConstraints(pattern=UNET_PART)]


class SdTrainer(LoopTrainer):
    """UNets of Stable Diffusion 1.x and 2.x, trained by Latentmake from caches.

    The trainer `sd` trains a LoRA, the complete UNet or parts of it. Neither VAE nor text encoder
    is in memory. Results lie in `runs/{run}/`: for a LoRA `pytorch_lora_weights.safetensors`
    (diffusers) and `kohya.safetensors` (A1111, Forge, ComfyUI), else a UNet. See [Stable
    Diffusion](../trainers/sd.md).

    ```yaml
    trainer: {kind: sd, rank: 16, steps: 2000, learning_rate: 1.0e-4}
    ```
    """

    layout: ClassVar[str] = "plain"
    network: ClassVar[str] = "unet"

    kind: Literal["sd"]
    """The trainer: `sd`."""
    adapter: Literal["lora", "full", "parts"] = "lora"
    """Weights to train. `lora`: a LoRA. `full`: the complete UNet. `parts`: only the `parts` of
    the UNet; the complete UNet is written."""
    parts: list[UNetPart] = Field([])
    """Parts that `adapter: parts` trains: `cross_attention`, `cross_attention_qk` (its queries and
    keys), `cross_attention_out`, `attention`, `norms`, `conv_in`, `conv_out`, `time_embedding`,
    `down_blocks`, `mid_block`, `up_blocks`, one block such as `up_blocks.1`, or `unet`."""
    reinitialize: list[UNetPart] = Field([])
    """Parts, by the names of `parts`, that start from random weights and are trained. `[unet]`
    trains from scratch. Not for a LoRA."""
    prediction_type: Literal["epsilon", "v_prediction", "flow_matching"] | None = None
    """Prediction of the UNet: `epsilon`, `v_prediction` or `flow_matching`; by default that of the
    scheduler."""
    snr_gamma: Real | None = Field(None, gt=0)
    """Min-SNR weighting of the loss: timesteps with little noise count less. `5` is usual. Not
    with `flow_matching`."""
    noise_offset: Real = Field(0.0, ge=0)
    """Constant noise added to each channel, for very dark and very bright images. `0.05` is
    usual."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.adapter != "parts" and self.parts:
            raise ValueError("`parts` needs `adapter: parts`")
        if self.adapter == "parts" and not (self.parts or self.reinitialize):
            raise ValueError("`adapter: parts` needs a list of `parts`")
        if self.adapter == "lora" and self.reinitialize:
            raise ValueError("a LoRA trains no part of the UNet: `reinitialize` nothing")
        if self.prediction_type == "flow_matching" and self.snr_gamma is not None:
            raise ValueError("`snr_gamma` weighs diffusion: leave it out of flow matching")
        return self
