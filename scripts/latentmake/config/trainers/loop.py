"""Settings that our own trainers share: those of the training loop, and of sample pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from latentmake.config.fields import (
    BatchSize,
    Closed,
    DiskPath,
    Number,
    Rank,
    Real,
    Resolution,
    ResolutionField,
    Steps,
    worded,
)
from latentmake.config.prompts import with_prompt_file
from latentmake.config.shapes import MACHINE, PICTURES, Shapes
from latentmake.config.trainers.base import (
    ACCUMULATION,
    AccelerateConfig,
    AutoPrecision,
    LoraAlpha,
    Trainer,
)


class Samples(Closed):
    """Pictures drawn by the trained network at the start, at intervals and at the end."""

    shapes: ClassVar[Shapes] = PICTURES

    prompts: list[str] = Field([])
    """Prompts; by default the captions of the run's first four items."""
    prompt_file: DiskPath | None = Field(None, min_length=1)
    """A text file with a prompt a line, in place of `prompts`."""
    negative_prompt: str = ""
    """Negative prompt of all samples."""
    every: Number | None = Field(None, gt=0)
    """Steps between two rows; by default a quarter of the run."""
    num_inference_steps: Number = Field(30, gt=0)
    """Denoising steps of a picture."""
    guidance_scale: Real = Field(3.0, ge=1)
    """Classifier-free guidance; 1 is none."""
    resolution: ResolutionField | None = None
    """Size of the pictures; by default the run's first resolution."""
    seed: Number = Field(0, ge=0)
    """Seed of their noise, the same in every row."""

    @model_validator(mode="before")
    @classmethod
    def _read_prompts(cls, values: Any) -> Any:
        return with_prompt_file(values)


class LoopTrainer(Trainer):
    """A trainer of ours: a LoRA or more of a network, from caches alone.

    Attributes:
        former_defaults: defaults of earlier releases, which digests of settings leave out.
    """

    former_defaults: ClassVar[Mapping[str, object]] = {"mixed_precision": "no"}

    kind: str
    """The trainer."""
    rank: Rank = 8
    """Rank of the LoRA."""
    alpha: LoraAlpha = None
    target_modules: list[str] = Field(["to_q", "to_k", "to_v", "to_out.0"], min_length=1)
    """Layers that get a LoRA, by the end of their names."""
    steps: Steps | None = None
    """Optimizer steps; by default 1000, or as many as `epochs` take."""
    epochs: Real | None = Field(None, gt=0, le=1_000_000_000)
    """Epochs, instead of `steps`."""
    optimizer: Literal["adamw", "adamw8bit", "lion", "prodigy", "dadaptation"] = "adamw"
    """Optimizer; adamw8bit needs bitsandbytes."""
    optimizer_arguments: dict[
        str,
        Annotated[
            bool | float | list[Real],
            worded("should be a number, true, false, or a list of numbers"),
        ],
    ] = Field({})
    """Further arguments of the optimizer, such as betas."""
    learning_rate: Real = Field(1e-4, gt=0)
    """Peak learning rate; by default 1 for prodigy and dadaptation."""
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "constant"
    """Learning-rate schedule."""
    lr_warmup_steps: Number = Field(0, ge=0)
    """Warm-up steps."""
    lr_min_ratio: Real = Field(0.0, ge=0, le=1)
    """Share of the peak at which linear and cosine end."""
    train_batch_size: BatchSize = 4
    """Items of one shape a step and a device."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    max_grad_norm: Real | None = Field(1.0, gt=0)
    """Gradients are clipped to this norm; null does not clip."""
    weight_decay: Real = Field(0.01, ge=0)
    """Weight decay of the optimizer."""
    ema_decay: Real | None = Field(None, gt=0, lt=1)
    """Decay of an EMA of the weights, which is then the result."""
    mixed_precision: AutoPrecision = "auto"
    """accelerate's mixed precision; auto is bf16, on a GPU without it fp16, and on a CPU no."""
    gradient_checkpointing: bool = False
    """Less memory for more time."""
    torch_compile: bool = False
    """Compile the network by torch.compile."""
    deterministic: bool = False
    """On a GPU, only kernels that repeat bit for bit; a CPU always does."""
    seed: Number = Field(0, ge=0)
    """Seed of order, noise, timesteps and new weights."""
    checkpointing_steps: Number = Field(500, ge=1, json_schema_extra=MACHINE)
    """Steps between two checkpoints."""
    checkpoints_total_limit: Number = Field(2, ge=1, json_schema_extra=MACHINE)
    """Number of them that are kept."""
    resume_from_checkpoint: DiskPath | None = Field(None, min_length=1)
    """A checkpoint folder of another training to go on from."""
    save_every_n_steps: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Steps between two copies of the trained weights."""
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two copies of the trained weights."""
    dataloader_num_workers: Number = Field(1, ge=0, json_schema_extra=MACHINE)
    """Threads that read caches ahead, for each device."""
    accelerate_config: AccelerateConfig = None
    samples: Samples = Samples()
    """Sample pictures."""

    @property
    def step_limit(self) -> int | None:
        """Upper bound of its steps, whatever `epochs` say."""
        return None

    @property
    def checkpoint_epochs(self) -> int | None:
        """Epochs between two checkpoints, besides those that its steps ask for."""
        return None

    @property
    def draws(self) -> bool:
        """Whether it draws samples along a training."""
        return True

    @property
    def prompts(self) -> list[str]:
        """Its prompts and, where guidance needs one, the negative prompt."""
        samples = self.samples
        guided = [samples.negative_prompt] if samples.guidance_scale > 1 else []
        return list(dict.fromkeys([*samples.prompts, *guided]))

    @property
    def sample_resolution(self) -> Resolution | None:
        """Size of its sample pictures, where it sets one."""
        return self.samples.resolution

    @model_validator(mode="before")
    @classmethod
    def _rate_of_its_own(cls, values: Any) -> Any:
        """These two find the rate themselves, and take the setting as a factor."""
        if isinstance(values, dict) and values.get("optimizer") in ("prodigy", "dadaptation"):
            return {"learning_rate": 1.0, **values}
        return values

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("has both `steps` and `epochs`: leave one out")
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise ValueError(
                "`lr_warmup_steps` has no effect on a constant learning rate: set `lr_scheduler: "
                "constant_with_warmup`"
            )
        if self.lr_min_ratio and self.lr_scheduler not in ("linear", "cosine"):
            raise ValueError("`lr_min_ratio` needs `lr_scheduler: linear` or `cosine`")
        return self
