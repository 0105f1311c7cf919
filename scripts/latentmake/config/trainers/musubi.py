"""Settings of the trainer `musubi`: musubi-tuner's training scripts."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from latentmake.config.fields import BatchSize, Number, Rank, Real, Steps
from latentmake.config.shapes import MACHINE
from latentmake.config.trainers.base import (
    ACCUMULATION,
    WORKERS,
    AccelerateConfig,
    LauncherAlpha,
    Logging,
    Precision,
    Trainer,
)
from latentmake.config.trainers.flags import MUSUBI, refuse_decided


class MusubiTrainer(Trainer):
    """The trainer `musubi`: musubi-tuner's training scripts, in its own environment."""

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"

    kind: Literal["musubi"]
    """The trainer."""
    network_dim: Rank = 32
    """Rank of the LoRA; by default that of the architecture's guide, 16 or 32."""
    network_alpha: LauncherAlpha = None
    learning_rate: Real = Field(2e-4, gt=0)
    """Learning rate; by default that of the architecture's guide, 2e-4 for Wan."""
    optimizer_type: str = Field("adamw", min_length=1)
    """Optimizer; adamw8bit needs bitsandbytes there."""
    max_train_epochs: Steps = 16
    """Epochs."""
    batch_size: BatchSize = 1
    """Items of one shape a step."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    max_data_loader_n_workers: Number = WORKERS
    mixed_precision: Precision = "bf16"
    """dtype of the DiT's weights."""
    attention: Literal["auto", "sdpa", "flash_attn", "flash3", "xformers"] = "auto"
    """Attention; auto: the first of flash_attn and xformers that the trainer's environment has,
    else sdpa."""
    timestep_sampling: str | None = "shift"
    """Sampling of timesteps; null leaves it to the trainer. By default what musubi-tuner's
    documentation has for the architecture: `shift` for Wan."""
    discrete_flow_shift: Real | None = Field(3.0, gt=0)
    """Shift of the timesteps; null leaves it to the trainer. By default likewise: 3 for Wan."""
    timestep_boundary: Number | None = Field(None, ge=0, le=1000)
    """Timestep between Wan 2.2's two networks, in thousandths; by default 875 for
    text-to-video and 900 for image-to-video."""
    gradient_checkpointing: bool | None = Field(None, json_schema_extra=MACHINE)
    """Less memory for more time; by default as the guide has it, true."""
    seed: Number | None = Field(None, ge=0)
    """Seed of order, noise and timesteps; by default that of the guide, 42."""
    fp8_base: bool = False
    """Keep the DiT's weights in 8 bits."""
    fp8_scaled: bool = False
    """Scale them block by block; needs fp8_base. Krea 2 and HiDream O1 need both."""
    logging: Logging = True
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Save weights, and a state from which a killed training goes on, this often."""
    arguments: list[str] = Field([])
    """Further arguments for the training script, as its documentation has them."""
    accelerate_config: AccelerateConfig = None

    @property
    def splits_attention(self) -> bool:
        """Whether each item of a batch has an attention of its own."""
        return "--split_attn" in self.arguments

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # Finished runs have these among their arguments: earlier releases had no keys for them.
        keys = ("gradient_checkpointing", "seed")
        free = {f"--{key}" for key in keys if getattr(self, key) is None}
        refuse_decided(type(self), self.arguments, MUSUBI, free=free)
        if self.fp8_scaled and not self.fp8_base:
            raise ValueError("`fp8_scaled` needs `fp8_base: true`")
        return self
