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
    """Pictures or clips that the trained network draws during a training.

    The trainers `sd` and `wan` draw samples at the start, every `every` steps and at the end.
    `runs/{run}/samples.png` shows them in a grid, `runs/{run}/samples/` holds each of them. For
    `wan` the samples are clips (`samples/step-000100_00.mp4`), and the grid shows the first,
    middle and last frame of each; without `prompts` it draws none.

    ```yaml
    trainer: {kind: sd, samples: {prompts: [a cat on a roof], every: 250}}
    ```

    A change in this section does not train again: pictures are drawn again from the weights at the
    start, the copies in `runs/{run}/saved`, the checkpoints and the result. A step whose weights
    are gone keeps its pictures; a missing picture is grey in `samples.png` and `null` in
    `samples/index.json`. A prompt that you remove and add again is not drawn a second time. Clips
    drawn after a training are those of [`generate`](generate.md).
    """

    shapes: ClassVar[Shapes] = PICTURES

    prompts: list[str] = Field([])
    """Prompts; by default the captions of the run's first four items."""
    prompt_file: DiskPath | None = Field(None, min_length=1)
    """Text file with one prompt a line, instead of `prompts`. Its lines count, not its name."""
    negative_prompt: str = ""
    """Negative prompt of all samples. It has no effect with `guidance_scale: 1`."""
    every: Number | None = Field(None, gt=0)
    """Steps between two rows of samples; by default a quarter of the run."""
    num_inference_steps: Number = Field(30, gt=0)
    """Denoising steps of a sample."""
    guidance_scale: Real = Field(3.0, ge=1)
    """Classifier-free guidance; `1` is no guidance."""
    resolution: ResolutionField | None = None
    """Size of the samples, written like an entry of `resolutions`; by default the first resolution
    of the run."""
    seed: Number = Field(0, ge=0)
    """Seed of the noise. A prompt has the same noise in every row and run, so that you can compare
    them."""

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
    """Scale of the LoRA, which is multiplied by `alpha / rank`; by default the rank."""
    target_modules: list[str] = Field(["to_q", "to_k", "to_v", "to_out.0"], min_length=1)
    """Layers that get a LoRA, by the ends of their names."""
    steps: Steps | None = None
    """Optimizer steps; by default 1000, or as many as `epochs` take. Raise it to train a finished
    run longer: the training resumes from its last state."""
    epochs: Real | None = Field(None, gt=0, le=1_000_000_000)
    """Epochs, instead of `steps`. Raise it to train a finished run longer."""
    optimizer: Literal["adamw", "adamw8bit", "lion", "prodigy", "dadaptation"] = "adamw"
    """Optimizer. `adamw8bit` needs bitsandbytes (`pip install bitsandbytes`); `lion`, `prodigy`
    and `dadaptation` are those of pytorch-optimizer."""
    optimizer_arguments: dict[
        str,
        Annotated[
            bool | float | list[Real],
            worded("should be a number, true, false, or a list of numbers"),
        ],
    ] = Field({})
    """Further arguments of the optimizer, such as `{betas: [0.9, 0.99]}`."""
    learning_rate: Real = Field(1e-4, gt=0)
    """Peak learning rate; by default 1 for `prodigy` and `dadaptation`, which find the rate
    themselves and multiply it by this value. With AdamW about `1e-4` for a LoRA and `1e-5` for a
    complete network; with Lion a third to a tenth of that."""
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "constant"
    """LR scheduler."""
    lr_warmup_steps: Number = Field(0, ge=0)
    """Warm-up steps, over which the learning rate rises from zero. Not with `constant`."""
    lr_min_ratio: Real = Field(0.0, ge=0, le=1)
    """Share of the peak learning rate at which `linear` and `cosine` end."""
    train_batch_size: BatchSize = 4
    """Items of a training step, for each device. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = ACCUMULATION
    """Batches whose gradients are accumulated before an optimizer step, if the memory does not
    allow a larger batch."""
    max_grad_norm: Real | None = Field(1.0, gt=0)
    """Norm to which gradients are clipped; `null` does not clip."""
    weight_decay: Real = Field(0.01, ge=0)
    """Weight decay of the optimizer."""
    ema_decay: Real | None = Field(None, gt=0, lt=1)
    """Decay of an EMA of the weights, such as `0.9999` for long trainings. Sample pictures and the
    result are then those of the EMA."""
    mixed_precision: AutoPrecision = "auto"
    """Mixed precision, as in accelerate. `auto` is `bf16` if the GPU supports it, else `fp16`, and
    `no` on a CPU. The training writes the choice into `runs/{run}/training.json` and keeps it when
    it resumes; another machine does not train again because of it."""
    gradient_checkpointing: bool = False
    """Less memory for about a third more time."""
    torch_compile: bool = False
    """Compile the network with `torch.compile`: a slow first step, then faster ones. If you set
    `accelerate_config`, that file decides."""
    deterministic: bool = False
    """Use only deterministic kernels on a GPU, which costs some speed. A CPU is always
    deterministic."""
    seed: Number = Field(0, ge=0)
    """Seed of order, noise, timesteps and new weights."""
    checkpointing_steps: Number = Field(500, ge=1, json_schema_extra=MACHINE)
    """Steps between two checkpoints in `runs/{run}/checkpoints/`, from which a killed training
    resumes. The state of the last step is always saved."""
    checkpoints_total_limit: Number = Field(2, ge=1, json_schema_extra=MACHINE)
    """Number of checkpoints to keep during a training. After it, the last state is kept, and each
    checkpoint that a `resume_from_checkpoint` names."""
    resume_from_checkpoint: DiskPath | None = Field(None, min_length=1)
    """Checkpoint of another training to start from, such as `runs/NAME/checkpoints/step-000500`:
    weights, optimizer state, EMA and step. `steps` count from the beginning of that training.
    Learning rate, weight decay, optimizer arguments and `ema_decay` are those of this run; a LoRA
    with another `alpha` is refused. The checkpoint is not removed while the configuration names
    it. Only its content counts, not its path. To train a run longer, raise its `steps` instead."""
    save_every_n_steps: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Steps between two copies of the trained weights, in `runs/{run}/saved/step-000500`. To get a
    copy at once, create the file `runs/{run}/save`. A copy holds the result so far; a checkpoint
    holds all that is needed to resume."""
    save_every_n_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two copies of the trained weights, in addition to those of
    `save_every_n_steps`."""
    dataloader_num_workers: Number = Field(1, ge=0, json_schema_extra=MACHINE)
    """Threads that read caches ahead, for each device; at least one is used. Caches of up to 256
    MB are kept in memory."""
    accelerate_config: AccelerateConfig = None
    """Configuration file for `accelerate launch`, for several GPUs or machines; `accelerate config
    --config_file FILE` writes one. DeepSpeed and FSDP are refused. Batch size, accumulation,
    clipping and precision of this section take precedence over the file. Another number of
    processes gives other weights, but does not train again; to train again, delete
    `runs/{run}/training.json`."""
    samples: Samples = Samples()
    """[Sample pictures](samples.md) drawn during the training."""

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
