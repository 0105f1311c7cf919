"""Settings of the trainer `wan`, our own for LoRAs of Wan 2.1 and 2.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from latentmake.config.fields import BatchSize, Number, Rank, Real, Resolution
from latentmake.config.generation import Generation, whole_latents
from latentmake.config.shapes import MACHINE
from latentmake.config.trainers.base import AutoPrecision
from latentmake.config.trainers.loop import LoopTrainer, Samples

_BETWEEN = (832 * 480 + 1280 * 720) // 2  # pixels: halfway between the sizes that Wan knows
_SMALL, _LARGE = 3.0, 5.0


class WanSamples(Samples):
    """Clips drawn by the trained network at the start, at intervals and at the end."""

    aliases: ClassVar[dict[str, str]] = {
        word: key
        for word, key in Generation.aliases.items()
        if key not in ("videos", "flow_shift", "scheduler")
    }

    prompts: list[str] = Field([])
    """Prompts; by default none, and no clips are drawn."""
    guidance_scale: Real = Field(5.0, ge=1)
    """Classifier-free guidance; 1 is none."""
    frames: Annotated[Number, AfterValidator(whole_latents)] = Field(17, ge=1)
    """Frames of a clip, 4 n + 1."""
    fps: Number = Field(16, ge=1, le=240)
    """Frames a second of the files."""


class WanTrainer(LoopTrainer):
    """The trainer `wan`: a LoRA of Wan's network, trained from musubi-tuner's caches."""

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"
    alternatives: ClassVar[tuple[str, ...]] = ("dit_high_noise",)
    generates: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    former_defaults: ClassVar[Mapping[str, object]] = {"mixed_precision": "bf16"}

    kind: Literal["wan"]
    """The trainer."""
    rank: Rank = 32
    """Rank of the LoRA."""
    max_steps: Number | None = Field(None, ge=1)
    """Upper bound of the steps, whatever `steps` and `epochs` say."""
    flow_shift: Real | None = Field(None, gt=0)
    """Shift of the timesteps; by default 3 for resolutions nearer to 832 x 480, 5 for those nearer
    to 1280 x 720."""
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of the timesteps before their shift."""
    timestep_boundary: Number | None = Field(None, ge=0, le=1000)
    """Timestep between Wan 2.2's two networks, in thousandths; by default 875 for
    text-to-video and 900 for image-to-video."""
    train_batch_size: BatchSize = 1
    """Items of one shape a step and a device."""
    mixed_precision: AutoPrecision = "auto"
    """accelerate's mixed precision, and the dtype of the frozen weights; auto is bf16, on a GPU
    without it fp16, and on a CPU no."""
    gradient_checkpointing: bool = True
    """Less memory for more time."""
    checkpointing_steps: Number = Field(100, ge=1, json_schema_extra=MACHINE)
    """Steps between two checkpoints."""
    checkpointing_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two checkpoints, besides those that the steps ask for."""
    samples: WanSamples = WanSamples()
    """Sample clips."""

    @property
    def step_limit(self) -> int | None:
        """Upper bound of its steps."""
        return self.max_steps

    @property
    def checkpoint_epochs(self) -> int | None:
        """Epochs between two checkpoints."""
        return self.checkpointing_epochs

    @property
    def draws(self) -> bool:
        """Whether it draws sample clips: captions of clips are no prompts of theirs."""
        return bool(self.samples.prompts)

    @property
    def prompts(self) -> list[str]:
        """Its prompts and, where guidance needs one, the negative prompt; none without clips."""
        return super().prompts if self.samples.prompts else []

    def shift(self, resolutions: Iterable[Resolution]) -> float:
        """Return the shift of the timesteps for a run of these resolutions.

        Wan's own are 3 for 832 x 480 and 5 for 1280 x 720:
        https://huggingface.co/docs/diffusers/api/pipelines/wan (Notes).
        """
        if self.flow_shift is not None:
            return self.flow_shift
        most = max(size.width * size.height for size in resolutions)
        return _SMALL if most <= _BETWEEN else _LARGE
