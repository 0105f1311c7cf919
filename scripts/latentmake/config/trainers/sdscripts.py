"""Settings of the trainer `sdscripts`: sd-scripts' training scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from latentmake.config.fields import BatchSize, Number, Rank, Real, Steps
from latentmake.config.sdscripts import SDSCRIPTS
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
from latentmake.config.trainers.flags import SD_SCRIPTS, flags_of, refuse_decided

if TYPE_CHECKING:
    Script = str
else:  # pydantic refuses any other
    Script = Literal[tuple(dict.fromkeys(name for x in SDSCRIPTS.values() for name in x.scripts))]
_OF_CAPTIONS = frozenset(
    {"--shuffle_caption", "--caption_dropout_rate", "--caption_dropout_every_n_epochs"}
    | {"--caption_tag_dropout_rate", "--token_warmup_min", "--token_warmup_step"}
    | {"--caption_prefix", "--caption_suffix", "--enable_wildcard", "--secondary_separator"}
    | {"--keep_tokens", "--keep_tokens_separator", "--caption_separator", "--weighted_captions"}
    | {"--train_text_encoder"}
)


class SdScriptsTrainer(Trainer):
    """The trainer `sdscripts`; keys have the names of its options."""

    layout: ClassVar[str] = "sdscripts"
    network: ClassVar[str] = "checkpoint"

    kind: Literal["sdscripts"]
    """The trainer."""
    script: Script | None = None
    """Its training script; by default the one that trains a LoRA."""
    network_dim: Rank = 16
    """Rank of the LoRA; by default that of the architecture's guide, 8, 16 or 32."""
    network_alpha: LauncherAlpha = None
    network_train_unet_only: bool = False
    """No LoRA for the text encoder of sd1 and sd2; others never have one."""
    learning_rate: Real = Field(1e-4, gt=0)
    """Learning rate; by default that of the guide: 1e-4, and 1e-5 for a complete network."""
    optimizer_type: str = Field("AdamW", min_length=1)
    """Optimizer; AdamW8bit needs bitsandbytes there."""
    lr_scheduler: str = Field("constant", min_length=1)
    """Learning-rate schedule."""
    max_train_epochs: Steps | None = None
    """Epochs; by default 10, or what `max_train_steps` says."""
    max_train_steps: Steps | None = None
    """Steps, instead of epochs."""
    train_batch_size: BatchSize = 1
    """Items of one shape a step."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    max_data_loader_n_workers: Number = WORKERS
    mixed_precision: Precision = "bf16"
    """accelerate's mixed precision."""
    gradient_checkpointing: bool = False
    """Less memory for more time; by default as the guide has it: true for a LoRA."""
    attention: Literal["sdpa", "xformers", "mem_eff_attn"] = "sdpa"
    """Attention: torch's own, xformers', or the slow one of little memory."""
    torch_compile: bool = False
    """Compile the network by torch.compile."""
    dynamo_backend: str | None = Field(None, min_length=1)
    """torch.compile backend; by default inductor."""
    deepspeed: bool = False
    """Train with DeepSpeed ZeRO."""
    zero_stage: Number = Field(2, ge=0, le=3)
    """DeepSpeed ZeRO stage."""
    seed: Number = Field(0, ge=0)
    """Seed of order, noise and timesteps."""
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two copies of the trained weights."""
    logging: Logging = True
    arguments: list[str] = Field([])
    """Further arguments of the script, as its documentation has them."""
    accelerate_config: AccelerateConfig = None

    @property
    def flags(self) -> list[str]:
        """The flags among its further arguments."""
        return flags_of(self.arguments)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_train_epochs is not None and self.max_train_steps is not None:
            raise ValueError("has both `max_train_epochs` and `max_train_steps`: leave one out")
        if self.dynamo_backend is not None and not self.torch_compile:
            raise ValueError("`dynamo_backend` needs `torch_compile: true`")
        if self.zero_stage != 2 and not self.deepspeed:
            raise ValueError("`zero_stage` needs `deepspeed: true`")
        refuse_decided(type(self), self.arguments, SD_SCRIPTS)
        return self

    def forbidden(self) -> str | None:
        """Return the first of its further arguments that cached text forbids or ignores."""
        return next((flag for flag in self.flags if flag in _OF_CAPTIONS), None)
