"""Settings of our own trainers `sd` and `wan`, their samples and their generated clips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from latentmake.config.fields import (
    CLIPS,
    MACHINE,
    PICTURES,
    UNET_PART,
    WEIGHTS,
    Applies,
    BatchSize,
    Closed,
    DiskPath,
    LearningRate,
    Listed,
    Number,
    Rank,
    Real,
    Resolution,
    ResolutionField,
    Shapes,
    Steps,
    shaped,
    worded,
)

Kind = Literal["sd", "wan", "musubi", "sdscripts"]
_NO_AS_TEXT = BeforeValidator(lambda value: "no" if value is False else value)  # YAML's `no`
Precision = Annotated[Literal["no", "bf16", "fp16"], _NO_AS_TEXT]
AutoPrecision = Annotated[Literal["auto", "no", "bf16", "fp16"], _NO_AS_TEXT]
Alpha = Annotated[Real | None, Field(gt=0)]
Logging = Annotated[bool, Field(json_schema_extra=MACHINE)]
AccelerateConfig = Annotated[DiskPath | None, Field(json_schema_extra=MACHINE)]
Workers = Annotated[Number, Field(ge=0, json_schema_extra=MACHINE)]
PriorLossWeight = Annotated[Real, Field(ge=0)]
ProgramSeed = Annotated[Number, Field(ge=0, le=2**32 - 1)]
"""Seed of a training by an external program, which also seeds NumPy: at most 32 bits."""


class Trainer(Closed, shapes=WEIGHTS):
    """Section of a trainer; the defaults fit a trainer that draws no samples."""

    layout: ClassVar[str]  # layout of the caches that it reads
    network: ClassVar[str]  # the model's key for the network that is trained
    alternatives: ClassVar[tuple[str, ...]] = ()  # keys that may be set instead of `network`
    ours: ClassVar[bool] = False  # whether Latentmake trains: it can also draw and evaluate
    holds_out: ClassVar[bool] = False  # whether it computes the loss of held-out items

    kind: str
    """The trainer."""
    title: str = shaped("", MACHINE)
    """Title of the weights in their header; by default the name of the run."""
    trigger: str = shaped("", MACHINE)
    """Trigger phrase of the weights, for their header: the words that a prompt needs."""
    author: str = shaped("", MACHINE)
    """Author of the weights, for their header."""
    license: str = shaped("", MACHINE)
    """License of the weights, for their header, such as `CC-BY-4.0`."""
    metadata: Literal["full", "standard", "none"] = shaped("standard", MACHINE)
    """Metadata in the header of the weights, see [the guide](../guides/memory.md). `standard`:
    training, settings, base model, and counts of the tags that at least 3 captions have; no
    caption and no file name. `full`: also captions, file names, the date and a thumbnail. `none`:
    only the values that programs need to load the weights."""

    @property
    def prompts(self) -> list[str]:
        """Texts besides captions whose embeddings it needs, without duplicates."""
        return []


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Return kind -> entry point of each trainer that another package brings.

    It names a subclass of `training.backend.Backend`, whose `settings` is a subclass of `Trainer`.
    """
    return {point.name: point for point in entry_points(group="latentmake.trainers")}


class Samples(Closed, shapes=PICTURES):
    """Pictures or clips that the trained network draws during a training."""

    prompts: list[str] = Field([])
    """Prompts; by default the captions of the run's first four items."""
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


_NOT_BOTH = Applies(
    "and `steps` are both set: leave one out", when=lambda trainer: trainer.steps is None
)
_WARMED = Applies(
    "has no effect on a constant learning rate: set `lr_scheduler: constant_with_warmup`",
    when=lambda trainer: trainer.lr_scheduler != "constant",
)
_DECAYED = Applies(
    "needs `lr_scheduler: linear` or `cosine`",
    when=lambda trainer: trainer.lr_scheduler in ("linear", "cosine"),
)
_LORA = Applies(
    "needs `adapter: lora`", when=lambda trainer: getattr(trainer, "adapter", "lora") == "lora"
)
_TWO_NETWORKS = Applies(
    "has one network, and no boundary between two",
    row=lambda model: model.version.boundary is not None,
)
BOUNDARY = Shapes("weights", applies=[_TWO_NETWORKS])


class LoopTrainer(Trainer):
    """Trainer of Latentmake, which trains a LoRA or a network from caches only."""

    draws_captions: ClassVar[bool] = True  # whether samples use captions if there are no `prompts`
    ours: ClassVar[bool] = True
    holds_out: ClassVar[bool] = True
    # Defaults of earlier releases. Digests leave these values out, so that they stay the same.
    former_defaults: ClassVar[Mapping[str, object]] = {"mixed_precision": "no"}

    rank: Rank = 8
    """Rank of the LoRA."""
    alpha: Alpha = None
    """Scale of the LoRA, which is multiplied by `alpha / rank`; by default the rank."""
    target_modules: list[str] = Field(["to_q", "to_k", "to_v", "to_out.0"], min_length=1)
    """Layers that get a LoRA, by the ends of their names."""
    lora_dropout: Real = Field(0.0, ge=0, lt=1)
    """Share of a layer's inputs that its LoRA does not see in a step (peft's `lora_dropout`)."""
    init_lora: DiskPath | None = shaped(
        None, Shapes("weights", indirect=True, applies=[_LORA]), min_length=1
    )
    """LoRA to begin from instead of a new one: a file in the names of diffusers (those of its old
    attention processors, too), kohya's scripts, musubi-tuner or ComfyUI, or the folder of a
    training (`runs/NAME`), as two networks of Wan 2.2
    need. Its rank must be `rank`, its layers those of `target_modules`. With another `alpha` it
    begins with the same effect. Only its content counts, not its path."""
    on_change: Literal["restart", "continue"] = shaped("restart", MACHINE)
    """Begin of a finished training whose data or settings change. `restart`: it begins anew.
    `continue`: it begins from its last weights, as with `init_lora`; the result then depends on
    what came before. Another model, `rank` or `adapter` needs `restart`."""
    steps: Steps | None = None
    """Optimizer steps; by default 1000, or as many as `epochs` take. Raise it to train a finished
    run longer: the training resumes from its last state."""
    epochs: Real | None = shaped(
        None, Shapes("weights", applies=[_NOT_BOTH]), gt=0, le=1_000_000_000
    )
    """Epochs, instead of `steps`. Raise it to train a finished run longer."""
    optimizer: Literal["adamw", "adamw8bit", "lion", "prodigy", "dadaptation"] = "adamw"
    """Optimizer. `adamw8bit` needs bitsandbytes (`pip install bitsandbytes`); `lion`, `prodigy`
    and `dadaptation` are those of pytorch-optimizer."""
    optimizer_arguments: dict[
        str,
        Annotated[
            bool | Real | list[Real],
            worded("should be a number, true, false, or a list of numbers"),
        ],
    ] = Field({})
    """Further arguments of the optimizer, such as `{betas: [0.9, 0.99]}`."""
    learning_rate: LearningRate = 1e-4
    """Peak learning rate; by default 1 for `prodigy` and `dadaptation`, which find the rate
    themselves and multiply it by this value. With AdamW about `1e-4` for a LoRA and `1e-5` for a
    complete network; with Lion a third to a tenth of that."""
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "constant"
    """LR scheduler."""
    lr_warmup_steps: Number = shaped(0, Shapes("weights", applies=[_WARMED]), ge=0)
    """Warm-up steps, over which the learning rate rises from zero. Not with `constant`."""
    lr_min_ratio: Real = shaped(0.0, Shapes("weights", applies=[_DECAYED]), ge=0, le=1)
    """Share of the peak learning rate at which `linear` and `cosine` end."""
    train_batch_size: BatchSize = 4
    """Items of a training step, for each device. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = 1
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
    """Mixed precision, as in accelerate; with `wan` also the dtype of the frozen weights. `auto` is
    `bf16` if the GPU supports it, else `fp16`, and `no` on a CPU. The training writes the choice
    into `runs/{run}/training.json` and keeps it when it resumes; another machine does not train
    again because of it."""
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
    checkpointing_steps: Number = shaped(500, MACHINE, ge=1)
    """Steps between two checkpoints in `runs/{run}/checkpoints/`, from which a killed training
    resumes. The state of the last step is always saved."""
    checkpoints_total_limit: Number = shaped(2, MACHINE, ge=1)
    """Number of checkpoints to keep during a training. After it, the last state is kept."""
    save_every_n_steps: Number | None = shaped(None, MACHINE, ge=1)
    """Steps between two copies of the trained weights, in `runs/{run}/saved/step-000500`. To get a
    copy at once, create the file `runs/{run}/save`. A copy holds the result so far; a checkpoint
    holds all that is needed to resume."""
    save_every_n_epochs: Number | None = shaped(None, MACHINE, ge=1)
    """Epochs between two copies of the trained weights, in addition to those of
    `save_every_n_steps`."""
    dataloader_num_workers: Number = shaped(1, MACHINE, ge=0)
    """Threads that read caches ahead, for each device; at least one is used."""
    accelerate_config: AccelerateConfig = None
    """Configuration file for `accelerate launch`, for several GPUs or machines; `accelerate config
    --config_file FILE` writes one. DeepSpeed and FSDP are refused. Batch size, accumulation,
    clipping and precision of this section take precedence over the file. Another number of
    processes gives other weights, but does not train again; `-R train` does."""
    samples: Samples = Samples()
    """[Sample pictures](samples.md) drawn during the training."""

    @property
    def step_limit(self) -> int | None:
        """Upper limit of the steps, for the trainer `wan`; None for `sd`."""
        return getattr(self, "max_steps", None)

    @property
    def checkpoint_epochs(self) -> int | None:
        """Epochs between two checkpoints, in addition to `checkpointing_steps`; None for `sd`."""
        return getattr(self, "checkpointing_epochs", None)

    @property
    def draws(self) -> bool:
        """Whether it draws samples during a training."""
        return self.draws_captions or bool(self.samples.prompts)

    @property
    def prompts(self) -> list[str]:
        """Prompts of the samples and, if guidance needs it, the negative prompt."""
        samples = self.samples
        if samples.guidance_scale > 1 and (samples.prompts or self.draws_captions):
            return list(dict.fromkeys([*samples.prompts, samples.negative_prompt]))
        return list(dict.fromkeys(samples.prompts))

    @model_validator(mode="before")
    @classmethod
    def _rate_of_its_own(cls, values: Any) -> Any:
        """Default to 1 for optimizers that find the rate themselves and multiply it by this key."""
        if isinstance(values, dict) and values.get("optimizer") in ("prodigy", "dadaptation"):
            return {"learning_rate": 1.0, **values}
        return values


_CHOSEN = Applies("needs `adapter: parts`", when=lambda trainer: trainer.adapter == "parts")
_WITH_PARTS = Applies(
    "needs a list of `parts`",
    when=lambda trainer: trainer.adapter == "full" or trainer.parts or trainer.reinitialize,
)
_NO_LORA = Applies(
    "is not for a LoRA, which trains no part of the UNet",
    when=lambda trainer: trainer.adapter != "lora",
)
_DIFFUSED = Applies(
    "weighs diffusion: leave it out of flow matching",
    when=lambda trainer: trainer.prediction_type != "flow_matching",
)
UNetPart = Annotated[str, StringConstraints(pattern=UNET_PART)]


class SdTrainer(LoopTrainer):
    """UNets of Stable Diffusion 1.x, 2.x and XL, trained by Latentmake from caches."""

    layout: ClassVar[str] = "plain"
    network: ClassVar[str] = "unet"

    kind: Literal["sd"]
    """The trainer: `sd`."""
    adapter: Literal["lora", "full", "parts"] = shaped(
        "lora", Shapes("weights", applies=[_WITH_PARTS])
    )
    """Weights to train. `lora`: a LoRA. `full`: the complete UNet. `parts`: only the `parts` of
    the UNet; the complete UNet is written."""
    parts: list[UNetPart] = shaped([], Shapes("weights", applies=[_CHOSEN]))
    """Parts that `adapter: parts` trains: `cross_attention`, `cross_attention_qk` (its queries and
    keys), `cross_attention_out`, `attention`, `norms`, `conv_in`, `conv_out`, `time_embedding`,
    `down_blocks`, `mid_block`, `up_blocks`, one block such as `up_blocks.1`, or `unet`."""
    reinitialize: list[UNetPart] = shaped([], Shapes("weights", applies=[_NO_LORA]))
    """Parts, by the names of `parts`, that start from random weights and are trained. `[unet]`
    trains from scratch. Not for a LoRA."""
    prediction_type: Literal["epsilon", "v_prediction", "flow_matching"] | None = None
    """Prediction of the UNet: `epsilon`, `v_prediction` or `flow_matching`. By default the model's
    files tell: the scheduler, or a tensor or the metadata of a single file."""
    zero_terminal_snr: bool | None = shaped(None, Shapes("weights", applies=[_DIFFUSED]))
    """Rescale the noise schedule so that its last timestep is noise only. By default the model's
    files tell. A UNet that predicts `epsilon` cannot learn it."""
    snr_gamma: Real | None = shaped(None, Shapes("weights", applies=[_DIFFUSED]), gt=0)
    """Min-SNR weighting of the loss: timesteps with little noise count less. `5` is usual. Not
    with `flow_matching`."""
    noise_offset: Real = Field(0.0, ge=0)
    """Constant noise added to each channel, for very dark and very bright images. `0.05` is
    usual."""
    prior_loss_weight: PriorLossWeight = 1.0
    """Factor of the loss of images of datasets with [`is_reg`](datasets.md#is_reg)."""


def _refuse_blank(prompt: str) -> str:
    if not prompt.strip():
        raise ValueError("is an empty prompt: say what to draw")
    return prompt


Prompt = Annotated[str, AfterValidator(_refuse_blank)]


def whole_latents(frames: int) -> int:
    """Return the number of frames if it gives complete latent frames; raises ValueError."""
    if frames % 4 != 1:
        below = max(0, frames - 1) // 4 * 4 + 1
        what = f"is not 4 n + 1, which Wan's VAE needs; use {below} or {below + 4}"
        raise ValueError(what)
    return frames


_DIFFERENT = Applies(
    "names a prompt twice: raise `videos` or `images` for more",
    when=lambda settings: len({*settings.prompts}) == len(settings.prompts),
)
_FROM_IMAGE = Applies("draws from text only", row=lambda model: model.image_to_video)
_FILMS = Applies("draws pictures, not clips", row=lambda model: model.spec.has_tasks)
_STILLS = Applies("draws clips: set `videos`", row=lambda model: not model.spec.has_tasks)
_OF_CLIPS = Shapes("clips", applies=[_FILMS])


class Generation(Closed, shapes=CLIPS):
    """Clips of the trainer `wan`, or pictures of `sd`, that `generate_{run}` draws."""

    prompts: Listed[Prompt] = shaped([], Shapes("clips", applies=[_DIFFERENT]))
    """Prompts; by default the captions of the run's first four items."""
    negative_prompt: str = ""
    """Negative prompt of all clips or pictures. It has no effect with `guidance_scale: 1`."""
    videos: Number = shaped(1, _OF_CLIPS, ge=1)
    """Clips of each prompt: the first with `seed`, the next with `seed + 1`, and so on."""
    images: Number = shaped(1, Shapes("clips", applies=[_STILLS]), ge=1)
    """Pictures of each prompt, with the trainer `sd`, in the place of `videos`."""
    frames: Annotated[Number, AfterValidator(whole_latents)] | None = shaped(None, _OF_CLIPS, ge=1)
    """Frames of a clip, 4 n + 1; by default those of the longest clips that the run trains on, or
    81."""
    resolution: ResolutionField | None = None
    """Size of the clips or pictures, written like an entry of `resolutions`, with sides that are
    multiples of 16 for Wan, and of 8 for Stable Diffusion; by default the first resolution of the
    run."""
    num_inference_steps: Number = Field(50, ge=1)
    """Denoising steps of a clip or picture."""
    guidance_scale: Real = Field(5.0, ge=1)
    """Classifier-free guidance. `1` is no guidance, which takes half the time."""
    flow_shift: Real | None = shaped(None, _OF_CLIPS, gt=0)
    """Shift of the timesteps, larger for larger clips; by default that of the training."""
    scheduler: Literal["unipc", "euler"] = shaped("unipc", _OF_CLIPS)
    """Solver: `unipc` as in Wan's pipelines in diffusers, or `euler`. Pictures have the one of
    `samples`: DDIM, or Euler for flow matching."""
    seed: Number = Field(0, ge=0)
    """Seed of the first clip or picture of each prompt. The noise depends only on the seed and the
    size; that of a picture also on the prompt, and is then the noise of a sample of this seed."""
    fps: Number = shaped(16, _OF_CLIPS, ge=1, le=240)
    """Frames per second of the files. Wan was trained with 16."""
    image: DiskPath | None = shaped(None, Shapes("clips", applies=[_FROM_IMAGE]), min_length=1)
    """First frame of all clips, which image-to-video models need. It is scaled to cover the clip
    and cut around its centre. Its content counts, not its name."""
    base: bool = True
    """Also draw each clip or picture without the LoRA, from the same noise."""
    lora: DiskPath | None = Field(None, min_length=1)
    """LoRA of the same trainer to draw with instead of the one that the run trained: the folder of
    a run, a saved step (`runs/NAME/saved/step-000500`), or a `pytorch_lora_weights.safetensors`,
    also in older names of diffusers. Its content counts, not its path."""
    lora_strength: Real = Field(1.0, gt=0)
    """Factor of what the LoRA adds to the network's weights."""

    @property
    def count(self) -> int:
        """Clips or pictures of each prompt; one of the two keys is always 1."""
        return self.videos * self.images


_BETWEEN = (832 * 480 + 1280 * 720) // 2  # pixels; halfway between Wan's two sizes
_SMALL, _LARGE = 3.0, 5.0


class WanSamples(Samples):
    """Sample clips of the trainer `wan`."""

    prompts: list[str] = Field([])
    """Prompts; without any, no clips are drawn."""
    guidance_scale: Real = Field(5.0, ge=1)
    frames: Annotated[Number, AfterValidator(whole_latents)] = Field(17, ge=1)
    """Frames of a clip, 4 n + 1."""
    fps: Number = Field(16, ge=1, le=240)
    """Frames per second of the files."""


class WanTrainer(LoopTrainer):
    """LoRAs of Wan 2.1 and 2.2, trained by Latentmake from caches."""

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"
    alternatives: ClassVar[tuple[str, ...]] = ("dit_high_noise",)
    draws_captions: ClassVar[bool] = False
    former_defaults: ClassVar[Mapping[str, object]] = {"mixed_precision": "bf16"}

    kind: Literal["wan"]
    """The trainer: `wan`."""
    rank: Rank = 32
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
    timestep_boundary: Number | None = shaped(None, BOUNDARY, ge=0, le=1000)
    """Timestep, in thousandths, at which Wan 2.2 changes its network; by default 875 for
    text-to-video and 900 for image-to-video."""
    train_batch_size: BatchSize = 1
    gradient_checkpointing: bool = True
    checkpointing_steps: Number = shaped(100, MACHINE, ge=1)
    checkpointing_epochs: Number | None = shaped(None, MACHINE, ge=1)
    """Epochs between two checkpoints, in addition to those of `checkpointing_steps`."""
    samples: WanSamples = WanSamples()
    """[Sample clips](samples.md) drawn during the training; none without `prompts`."""

    def shift(self, resolutions: Iterable[Resolution]) -> float:
        """Return the shift of the timesteps for a run with these resolutions.

        Wan recommends 3 for 832 x 480 and 5 for 1280 x 720:
        https://huggingface.co/docs/diffusers/api/pipelines/wan (Notes).
        """
        if self.flow_shift is not None:
            return self.flow_shift
        most = max(size.width * size.height for size in resolutions)
        return _SMALL if most <= _BETWEEN else _LARGE
