"""Settings of the trainer `sd`, our own for Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from latentmake.config.fields import UNET_PART, Real
from latentmake.config.trainers.loop import LoopTrainer

UNetPart = Annotated[str, StringConstraints(pattern=UNET_PART)]


class SdTrainer(LoopTrainer):
    """The trainer `sd`: UNets of Stable Diffusion 1.x and 2.x, trained from caches alone."""

    layout: ClassVar[str] = "plain"
    network: ClassVar[str] = "unet"

    kind: Literal["sd"]
    """The trainer."""
    adapter: Literal["lora", "full", "parts"] = "lora"
    """Train a LoRA, the complete UNet, or its `parts` alone."""
    parts: list[UNetPart] = Field([])
    """Parts that `adapter: parts` trains: cross_attention, norms, up_blocks.1, ..."""
    reinitialize: list[UNetPart] = Field([])
    """Parts that begin with random weights, and are trained."""
    prediction_type: Literal["epsilon", "v_prediction", "flow_matching"] | None = None
    """Prediction of the UNet; by default that of its scheduler."""
    snr_gamma: Real | None = Field(None, gt=0)
    """Min-SNR weighting of the loss; 5 is usual."""
    noise_offset: Real = Field(0.0, ge=0)
    """Noise offset added to each channel, for darker and lighter images."""

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
