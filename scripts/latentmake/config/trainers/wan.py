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
    """Sample clips of the trainer `wan`."""

    aliases: ClassVar[dict[str, str]] = {
        word: key
        for word, key in Generation.aliases.items()
        if key not in ("videos", "flow_shift", "scheduler")
    }

    prompts: list[str] = Field([])
    """Prompts; without any, no clips are drawn."""
    guidance_scale: Real = Field(5.0, ge=1)
    """Classifier-free guidance; `1` is no guidance."""
    frames: Annotated[Number, AfterValidator(whole_latents)] = Field(17, ge=1)
    """Frames of a clip, 4 n + 1."""
    fps: Number = Field(16, ge=1, le=240)
    """Frames per second of the files."""


class WanTrainer(LoopTrainer):
    """LoRAs of Wan 2.1 and 2.2, trained by Latentmake from caches.

    The trainer `wan` trains text-to-video and image-to-video from the caches of a model with a
    `task`. It needs neither musubi-tuner nor, during the training, VAE and text encoder. See
    [Wan](../trainers/wan.md).

    ```yaml
    trainer: {kind: wan, rank: 32, epochs: 10, save_every_n_epochs: 1}
    ```

    - The model's `dit` is a folder of diffusers, a folder of the original release, or a
      `.safetensors` file with the names of either.
    - For Wan 2.2 the networks that the model names are trained: `dit` for low noise,
      `dit_high_noise` for high noise, each in its own range of timesteps.
    - Results lie in `runs/{run}/`: `pytorch_lora_weights.safetensors` for diffusers,
      `musubi.safetensors` and `comfyui.safetensors`. Names of files for the high-noise network
      begin with `high_noise_`. The LoRA is in float32.
    - Images and clips may be mixed.
    """

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"
    alternatives: ClassVar[tuple[str, ...]] = ("dit_high_noise",)
    generates: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    former_defaults: ClassVar[Mapping[str, object]] = {"mixed_precision": "bf16"}

    kind: Literal["wan"]
    """The trainer: `wan`."""
    rank: Rank = 32
    """Rank of the LoRA."""
    max_steps: Number | None = Field(None, ge=1)
    """Upper limit of the steps, whatever `steps` and `epochs` say, such as `50` for a smoke
    test."""
    flow_shift: Real | None = Field(None, gt=0)
    """Shift of the timesteps, as `--discrete_flow_shift` of musubi-tuner: a share of noise `s`
    becomes `shift s / (1 + (shift - 1) s)`. By default 3 if the largest resolution is nearer to
    832 x 480, 5 if it is nearer to 1280 x 720. For generation, Wan 2.2 uses 12 (text-to-video) and
    5 (image-to-video)."""
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of the timesteps before the shift. `logit_normal` is the one with which Wan was
    trained, and `shift` of musubi-tuner."""
    timestep_boundary: Number | None = Field(None, ge=0, le=1000)
    """Timestep, in thousandths, at which Wan 2.2 changes its network; by default 875 for
    text-to-video and 900 for image-to-video."""
    train_batch_size: BatchSize = 1
    """Items of a training step, for each device. A batch holds items of one shape."""
    mixed_precision: AutoPrecision = "auto"
    """Mixed precision, as in accelerate, and dtype of the frozen weights. `auto` is `bf16` if the
    GPU supports it, else `fp16`, and `no` on a CPU. The training writes the choice into
    `runs/{run}/training.json` and keeps it when it resumes; another machine does not train again
    because of it."""
    gradient_checkpointing: bool = True
    """Less memory for about a third more time."""
    checkpointing_steps: Number = Field(100, ge=1, json_schema_extra=MACHINE)
    """Steps between two checkpoints in `runs/{run}/checkpoints/`, from which a killed training
    resumes. The state of the last step is always saved."""
    checkpointing_epochs: Number | None = Field(None, ge=1, json_schema_extra=MACHINE)
    """Epochs between two checkpoints, in addition to those of `checkpointing_steps`."""
    samples: WanSamples = WanSamples()
    """[Sample clips](samples.md) drawn during the training; none without `prompts`."""

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
