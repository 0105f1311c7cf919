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
    """LoRAs of Wan and other architectures, trained by musubi-tuner.

    `train_{run}` first checks the same list as `latentmake check`, then runs the training script
    of the architecture (for Wan `wan_train_network.py`) in the environment of musubi-tuner. It
    succeeds only if the script has written a new and complete LoRA:
    `runs/{run}/{run}.safetensors`. See [musubi-tuner](../trainers/musubi.md).

    ```yaml
    trainer: {kind: musubi, max_train_epochs: 16, arguments: [--blocks_to_swap, "20"]}
    ```

    The keys are options of musubi-tuner. Defaults are those of its guide for the architecture, see
    [training defaults](architectures.md#training-defaults-of-musubi-tuner). An item with several
    texts (`captions.variants`) is trained as several items, each seen `num_repeats` times in an
    epoch.
    """

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"

    kind: Literal["musubi"]
    """The trainer: `musubi`."""
    network_dim: Rank = 32
    """Rank of the LoRA. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 32 for Wan."""
    network_alpha: LauncherAlpha = None
    """Scale of the LoRA, which is multiplied by `network_alpha / network_dim`. `null` is the rank.
    The default is 1, and the rank for Krea 2 and Kandinsky 5."""
    learning_rate: Real = Field(2e-4, gt=0)
    """Learning rate. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 2e-4 for Wan."""
    optimizer_type: str = Field("adamw", min_length=1)
    """Optimizer. `adamw8bit` needs bitsandbytes in the environment of musubi-tuner."""
    max_train_epochs: Steps = 16
    """Epochs."""
    batch_size: BatchSize = 1
    """Items of a training step. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    """Batches whose gradients are accumulated before an optimizer step."""
    max_data_loader_n_workers: Number = WORKERS
    """Processes that read caches."""
    mixed_precision: Precision = "bf16"
    """dtype of the weights of the DiT, as far as the training script of the architecture allows
    it."""
    attention: Literal["auto", "sdpa", "flash_attn", "flash3", "xformers"] = "auto"
    """Attention. `auto` takes the first of `flash_attn` and `xformers` that the environment of
    musubi-tuner can import and its version supports, else `sdpa`. It is chosen when the training
    starts; for published scripts set [`publish.attention`](publish.md#attention)."""
    timestep_sampling: str | None = "shift"
    """Distribution of the timesteps; `null` leaves it to musubi-tuner. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); `shift` for Wan."""
    discrete_flow_shift: Real | None = Field(3.0, gt=0)
    """Shift of the timesteps; `null` leaves it to musubi-tuner. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 3 for Wan."""
    timestep_boundary: Number | None = Field(None, ge=0, le=1000)
    """Timestep, in thousandths, at which Wan 2.2 changes its network; by default 875 for
    text-to-video and 900 for image-to-video."""
    gradient_checkpointing: bool | None = Field(None, json_schema_extra=MACHINE)
    """Less memory for about a third more time; by default `true`, as in musubi-tuner's guides."""
    seed: Number | None = Field(None, ge=0)
    """Seed of order, noise and timesteps; by default 42, as in musubi-tuner's guides."""
    fp8_base: bool = False
    """Keep the weights of the DiT in 8 bits."""
    fp8_scaled: bool = False
    """Scale the 8-bit weights block by block; needs `fp8_base`. Krea 2 and HiDream O1 need both
    keys, HunyuanVideo has only `fp8_base`, Ideogram 4 has neither."""
    logging: Logging = True
    """Write TensorBoard scalars to `runs/{run}/logs`."""
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two saves of the weights and of a state from which a killed training
    resumes."""
    arguments: list[str] = Field([])
    """Further arguments of the training script, such as `[--blocks_to_swap, "20"]`. A flag that a
    key decides is refused with the name of that key. A value with a slash, an ending or `~` that
    exists, seen from the project, is taken as a path and made absolute; write `./prompts` for a
    folder. In published scripts such a path, and an absolute path of another machine (`[--vae,
    "C:/models/vae.safetensors"]`), gets the name that each system has for it."""
    accelerate_config: AccelerateConfig = None
    """Configuration file for `accelerate launch`."""

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
