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
    """Models that sd-scripts trains, from caches in its layout.

    `train_{run}` makes `runs/{run}/sdscripts/`, a folder of links to images and caches with a
    `metadata.json` for each dataset and resolution, and runs the script in the environment of
    sd-scripts. It succeeds only if the script has written a new and complete file:
    `runs/{run}/{run}.safetensors`. See [sd-scripts](../trainers/sdscripts.md).

    ```yaml
    trainer: {kind: sdscripts, network_dim: 32, max_train_epochs: 10}
    ```

    The keys are options of sd-scripts. Defaults are those of its guide for the architecture, see
    [training defaults](architectures.md#training-defaults-of-sd-scripts). An item with several
    texts (`captions.variants`) is trained as several images, each seen once in an epoch, so that
    shuffled tags, wildcards and dropout work with cached text. For Flux, `vae` and `text` of the
    model are single files, which become `--ae`, `--clip_l` and `--t5xxl`.
    """

    layout: ClassVar[str] = "sdscripts"
    network: ClassVar[str] = "checkpoint"

    kind: Literal["sdscripts"]
    """The trainer: `sdscripts`."""
    script: Script | None = None
    """Training script of sd-scripts; by default the one that trains a LoRA. `fine_tune` (`sd1`,
    `sd2`) and `sdxl_train` train the complete network."""
    network_dim: Rank = 16
    """Rank of the LoRA. The default is 32 for `sdxl`, 8 for `lumina` and `anima`, else 16."""
    network_alpha: LauncherAlpha = None
    """Scale of the LoRA, which is multiplied by `network_alpha / network_dim`. `null` is the rank.
    The default is half of the rank for `sdxl`, the rank for `lumina`, else 1."""
    network_train_unet_only: bool = False
    """Do not train a LoRA for the text encoder of `sd1` and `sd2`. With cached text it is never
    trained."""
    learning_rate: Real = Field(1e-4, gt=0)
    """Learning rate. The default is 1e-4 for a LoRA and 1e-5 for a complete network."""
    optimizer_type: str = Field("AdamW", min_length=1)
    """Optimizer. `AdamW8bit` needs bitsandbytes in the environment of sd-scripts."""
    lr_scheduler: str = Field("constant", min_length=1)
    """LR scheduler."""
    max_train_epochs: Steps | None = None
    """Epochs; by default 10, if `max_train_steps` is not set."""
    max_train_steps: Steps | None = None
    """Steps, instead of epochs."""
    train_batch_size: BatchSize = 1
    """Items of a training step. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    """Batches whose gradients are accumulated before an optimizer step."""
    max_data_loader_n_workers: Number = WORKERS
    """Processes that read caches."""
    mixed_precision: Precision = "bf16"
    """Mixed precision, as in accelerate."""
    gradient_checkpointing: bool = False
    """Less memory for about a third more time. The default is `true` for a LoRA and `false` for a
    complete network."""
    attention: Literal["sdpa", "xformers", "mem_eff_attn"] = "sdpa"
    """Attention: `sdpa` of torch, `xformers`, or `mem_eff_attn`, which is slow and needs little
    memory."""
    torch_compile: bool = False
    """Compile the network with `torch.compile`."""
    dynamo_backend: str | None = Field(None, min_length=1)
    """Backend of `torch.compile`; by default `inductor`."""
    deepspeed: bool = False
    """Train with DeepSpeed ZeRO, which the environment of sd-scripts must have."""
    zero_stage: Number = Field(2, ge=0, le=3)
    """Stage of DeepSpeed ZeRO."""
    seed: Number = Field(0, ge=0)
    """Seed of order, noise and timesteps."""
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two saves of the weights in `runs/{run}/output/`, and of a state from which a
    killed training resumes."""
    logging: Logging = True
    """Write TensorBoard scalars to `runs/{run}/logs`."""
    arguments: list[str] = Field([])
    """Further arguments of the script, such as `[--timestep_sampling, shift,
    --discrete_flow_shift, "3.0"]`. A flag that a key decides, that belongs to the dataset, or that
    does not work with caches is refused. A value with a slash, an ending or `~` that exists, seen
    from the project, is taken as a path and made absolute."""
    accelerate_config: AccelerateConfig = None
    """Configuration file for `accelerate launch`."""

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
