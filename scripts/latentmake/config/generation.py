"""Settings of the clips that `generate_{run}` makes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from latentmake.config.fields import Closed, DiskPath, Number, Real, ResolutionField, listed
from latentmake.config.prompts import with_prompt_file
from latentmake.config.shapes import CLIPS, Shapes

_LATENT_FRAMES = 4  # frames a latent of Wan's VAE, after the first


def _no_blank(prompt: str) -> str:
    if not prompt.strip():
        raise ValueError("is an empty prompt: describe a clip")
    return prompt


Prompt = Annotated[str, AfterValidator(_no_blank)]


def prompt_of_command(value: object) -> object:
    """Return the text of `--config prompt=...`, of which Snakemake makes a number where it can."""
    return str(value) if isinstance(value, int | float) else value


def whole_latents(frames: int) -> int:
    """Return a number of frames that makes whole latents; raises ValueError."""
    if frames % _LATENT_FRAMES != 1:
        below = frames // _LATENT_FRAMES * _LATENT_FRAMES + 1
        near = [each for each in (below - _LATENT_FRAMES, below) if 0 < each < frames]
        near.append(below if below > frames else below + _LATENT_FRAMES)
        raise ValueError(
            f"is not 4 n + 1, which Wan's VAE needs; use {' or '.join(map(str, near[-2:]))}"
        )
    return frames


class Generation(Closed):
    """Clips that `generate_{run}` draws with the trained network.

    `snakemake generate_{run}` trains the run if needed, then draws clips into
    `runs/{run}/generated/`: an MP4 (H.264) for each prompt and seed, with the LoRA and without it,
    from the same noise. `index.html` plays them side by side, `contact_sheet.png` shows frames of
    all clips, and `index.json` says what each clip was made from.

    ```yaml
    generate:
      prompts: [a tram in the rain, the harbour by night]
      negative_prompt: blurred
      videos: 2
    ```

    Clips with the same weights, prompt, seed and settings are not drawn again. Clips of a prompt
    or setting that you removed are deleted. For the trainer `wan`; see the guide [Wan from
    films](../guides/wan.md).
    """

    shapes: ClassVar[Shapes] = CLIPS
    aliases: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("prompt", "sample_prompts", "texts"), "prompts"),
        **dict.fromkeys(("n_prompt", "negative", "negative_prompts"), "negative_prompt"),
        **dict.fromkeys(("num_frames", "video_length", "target_frames"), "frames"),
        **dict.fromkeys(("steps", "infer_steps", "sample_steps"), "num_inference_steps"),
        **dict.fromkeys(("guidance", "cfg", "cfg_scale", "sample_guide_scale"), "guidance_scale"),
        **dict.fromkeys(("num_videos", "num_videos_per_prompt", "count"), "videos"),
        **dict.fromkeys(("shift", "discrete_flow_shift", "sample_shift"), "flow_shift"),
        **dict.fromkeys(("width", "height", "size", "video_size", "resolutions"), "resolution"),
        **dict.fromkeys(("sample_solver", "solver", "sampler"), "scheduler"),
        **dict.fromkeys(("seeds", "base_seed"), "seed"),
    }
    """Words of diffusers, Wan's generate.py and musubi-tuner -> key."""

    prompts: Annotated[
        list[Prompt], BeforeValidator(listed, json_schema_input_type=str | list[str])
    ] = Field([])
    """Prompts; by default the captions of the run's first four items."""
    prompt_file: DiskPath | None = Field(None, min_length=1)
    """Text file with one prompt a line, instead of `prompts`. Its lines count, not its name."""
    negative_prompt: str = ""
    """Negative prompt of all clips. It has no effect with `guidance_scale: 1`."""
    videos: Number = Field(1, ge=1)
    """Clips of each prompt: the first with `seed`, the next with `seed + 1`, and so on."""
    frames: Annotated[Number, AfterValidator(whole_latents)] | None = Field(None, ge=1)
    """Frames of a clip, 4 n + 1; by default those of the longest clips that the run trains on, or
    81."""
    resolution: ResolutionField | None = None
    """Size of the clips, written like an entry of `resolutions`, with sides that are multiples of
    16; by default the first resolution of the run."""
    num_inference_steps: Number = Field(50, ge=1)
    """Denoising steps of a clip."""
    guidance_scale: Real = Field(5.0, ge=1)
    """Classifier-free guidance. `1` is no guidance, which takes half the time."""
    flow_shift: Real | None = Field(None, gt=0)
    """Shift of the timesteps, larger for larger clips; by default that of the training."""
    scheduler: Literal["unipc", "euler"] = "unipc"
    """Solver: `unipc` as in Wan's pipelines in diffusers, or `euler`."""
    seed: Number = Field(0, ge=0)
    """Seed of the first clip of each prompt. The noise depends only on the seed and the size."""
    fps: Number = Field(16, ge=1, le=240)
    """Frames per second of the files. Wan was trained with 16."""
    image: DiskPath | None = Field(None, min_length=1)
    """First frame of all clips, which image-to-video models need. It is scaled to cover the clip
    and cut around its centre. Its content counts, not its name."""
    base: bool = True
    """Also draw each clip without the LoRA, from the same noise."""

    @model_validator(mode="before")
    @classmethod
    def _read_prompts(cls, values: Any) -> Any:
        return with_prompt_file(values)

    @model_validator(mode="after")
    def _no_doubles(self) -> Self:
        for prompt in self.prompts:
            if self.prompts.count(prompt) > 1:
                raise ValueError(f"names a prompt twice ({prompt[:60]}): raise `videos` for more")
        return self
