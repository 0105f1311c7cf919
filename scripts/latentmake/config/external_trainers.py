"""Settings of the trainers `musubi` and `sdscripts`, and flags that `arguments` cannot contain.

A flag that a key decides is refused in `arguments`. Else the key would have no effect, or the
training would not fit the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from latentmake.config.architectures import SDSCRIPTS
from latentmake.config.fields import (
    MACHINE,
    MODULE,
    NETWORK_ARG,
    PLAIN_NETWORK_ARG,
    Applies,
    BatchSize,
    LearningRate,
    Listed,
    Number,
    Rank,
    Real,
    Shapes,
    Steps,
    shaped,
    shaping,
)
from latentmake.config.trainers import (
    BOUNDARY,
    AccelerateConfig,
    Alpha,
    Logging,
    Precision,
    PriorLossWeight,
    ProgramSeed,
    Prompt,
    Samples,
    Trainer,
    Workers,
)

_INSTEAD = {
    "latentmake names datasets and caches": "dataset_config train_data_dir in_json dataset_class "
    "dataset_repeats reg_data_dir skip_cache_check",
    "latentmake names the results, in runs/{run}": "output_dir output_name save_model_as",
    "cached latents cannot be varied": "color_aug random_crop face_crop_aug_range",
    "it is a key of the dataset": "resolution enable_bucket min_bucket_reso max_bucket_reso "
    "bucket_reso_steps bucket_no_upscale flip_aug alpha_mask resize_interpolation "
    "skip_image_resolution",
    "`save_every_n_epochs` saves states, and a killed training is resumed by itself": "resume "
    "save_state save_state_on_train_end save_last_n_epochs_state initial_epoch initial_step "
    "skip_until_initial_step",
    "set its options here": "config_file",
    "set `logging`": "logging_dir",
    "SageAttention has no backward pass": "sage_attn",
    "set it in the model": "task model_version dit dit_high_noise v2 clip_skip max_token_length "
    "pretrained_model_name_or_path t5xxl_max_token_length apply_lg_attn_mask apply_t5_attn_mask",
}
_DECIDED = {f"--{word}": instead for instead, words in _INSTEAD.items() for word in words.split()}
"""Flag of a training script without a key of the same name -> advice for the message."""
_SAMPLING = dict.fromkeys(
    ("--sample_prompts", "--sample_at_first", "--sample_every_n_steps", "--sample_every_n_epochs"),
    "set the keys of `samples`",
)


PREDICTING = ("v_parameterization", "zero_terminal_snr")
"""Keys about the prediction of the network; sd-scripts has flags of the same names."""


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return flag -> next argument, or the value behind `=`; "" if there is none."""
    flags: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            flags[flag] = value if equals else following
    return flags


def _refuse_decided(trainer: Any) -> Any:
    """Refuse flags in the `arguments` of a trainer that a key decides."""
    fields = type(trainer).model_fields
    attentions = get_args(fields["attention"].annotation)
    decided = {
        **_DECIDED,
        **trainer.absent,
        **{f"--{key}": f"set `{key}`" for key in fields},
        **{f"--{kind}": f"set `attention: {kind}`" for kind in attentions},
        **(_SAMPLING if trainer.samples.prompts else {}),
    }
    # Allowed unless the key is set: earlier releases had no keys for these flags, so finished runs
    # may have them in `arguments`.
    undecided = dict.fromkeys(("gradient_checkpointing", "seed", *PREDICTING))
    undecided |= {"prior_loss_weight": 1.0, "network_args": []}
    for key, default in undecided.items():
        if getattr(trainer, key, "") == default:
            del decided[f"--{key}"]
    if flag := next((name for name in flags_of(trainer.arguments) if name in decided), None):
        raise ValueError(f"`arguments`: leave out {flag}: {decided[flag]}")
    return trainer


NetworkModule = Annotated[str, StringConstraints(pattern=MODULE, max_length=200)]

_SCALED = Applies("needs `fp8_base: true`", when=lambda trainer: trainer.fp8_base)
_COMPILED = Applies("needs `torch_compile: true`", when=lambda trainer: trainer.torch_compile)
_NOT_BOTH = Applies(
    "and `max_train_epochs` are both set: leave one out",
    when=lambda trainer: trainer.max_train_epochs is None,
)
_PREDICTS = Applies(
    "is only for sd1, sd2 and sdxl", row=lambda model: model.spec.prediction != "flow_matching"
)
_EPOCHS = 16  # number in musubi-tuner's guides
_IN_PLACE = Applies(
    "and `max_train_epochs` are both set: leave one out",
    # The default counts as not set, because orders contain all keys.
    when=lambda trainer: trainer.max_train_epochs == _EPOCHS,
)
_STAGED = Applies("needs `deepspeed: true`", when=lambda trainer: trainer.deepspeed)


class LaunchedSamples(Samples):
    """Sample pictures of a trainer that is another program, which draws them itself."""

    prompts: list[Prompt] = Field([])
    """Prompts; without any, none is drawn. Options of the trainer's prompt file may follow a
    prompt, such as `a cat --i /data/first.png` for image-to-video: name such files by absolute
    paths."""
    negative_prompt: str = ""
    """Negative prompt of all samples."""
    every: Number | None = Field(None, gt=0)
    """Steps between two rows of samples; by default they are drawn after each epoch."""
    guidance_scale: Real | None = Field(None, ge=1)  # type: ignore[assignment]
    """Classifier-free guidance; by default the trainer's own."""
    seed: Number = Field(0, ge=0)
    """Seed of the noise of each prompt."""


class MusubiSamples(LaunchedSamples):
    """Sample pictures or clips of the trainer `musubi`."""

    frames: Number = Field(1, ge=1)
    """Frames of a clip; `1` is a picture."""


_CACHED = ("latents", "text_encoder_outputs")


class MusubiTrainer(Trainer):
    """LoRAs of Wan and other architectures, trained by musubi-tuner."""

    layout: ClassVar[str] = "musubi"
    network: ClassVar[str] = "dit"
    absent: ClassVar[Mapping[str, str]] = dict.fromkeys(
        [f"--cache_{kind}{end}" for kind in _CACHED for end in ("", "_to_disk")],
        "musubi-tuner has no such flag: two caching scripts, which run before, take its place",
    )
    """Flags of other programs -> advice for the message."""

    kind: Literal["musubi"]
    """The trainer: `musubi`."""
    network_dim: Rank = 32
    """Rank of the LoRA. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 32 for Wan."""
    network_alpha: Alpha = None
    """Scale of the LoRA, which is multiplied by `network_alpha / network_dim`. `null` is the rank.
    The default is 1, and the rank for Krea 2 and Kandinsky 5."""
    network_module: NetworkModule | None = None
    """Module that makes the network to train, such as `networks.loha` or `networks.lokr`; by
    default that of the architecture's LoRA. musubi-tuner or its environment must have it."""
    network_args: Listed[Annotated[str, StringConstraints(pattern=PLAIN_NETWORK_ARG)]] = Field([])
    """Arguments of that module, such as `[factor=4, rank_dropout=0.1]`."""
    learning_rate: LearningRate = 2e-4
    """Learning rate. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 2e-4 for Wan."""
    optimizer_type: str = Field("adamw", min_length=1)
    """Optimizer. `adamw8bit` needs bitsandbytes in the environment of musubi-tuner."""
    max_train_epochs: Steps = _EPOCHS
    """Epochs, if `max_train_steps` is not set."""
    max_train_steps: Steps | None = shaped(None, Shapes("weights", applies=[_IN_PLACE]))
    """Steps, instead of epochs. A killed training then begins anew."""
    batch_size: BatchSize = 1
    """Items of a training step. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = 1
    """Batches whose gradients are accumulated before an optimizer step."""
    max_data_loader_n_workers: Workers = 2
    """Processes that read caches."""
    mixed_precision: Precision = "bf16"
    """dtype of the weights of the DiT, as far as the training script of the architecture allows
    it."""
    attention: Literal["auto", "sdpa", "flash_attn", "flash3", "xformers"] = "auto"
    """Attention. `auto` takes the first of `flash_attn` and `xformers` that the environment of
    musubi-tuner can import and its version supports, else `sdpa`. It is chosen when the training
    starts; published scripts choose where they run."""
    timestep_sampling: str | None = "shift"
    """Distribution of the timesteps; `null` leaves it to musubi-tuner. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); `shift` for Wan."""
    discrete_flow_shift: Real | None = Field(3.0, gt=0)
    """Shift of the timesteps; `null` leaves it to musubi-tuner. The default depends on the
    [architecture](architectures.md#training-defaults-of-musubi-tuner); 3 for Wan."""
    timestep_boundary: Number | None = shaped(None, BOUNDARY, ge=0, le=1000)
    """Timestep, in thousandths, at which Wan 2.2 changes its network; by default 875 for
    text-to-video and 900 for image-to-video."""
    gradient_checkpointing: bool | None = shaped(None, MACHINE)
    """Less memory for about a third more time; by default `true`, as in musubi-tuner's guides."""
    seed: ProgramSeed | None = None
    """Seed of order, noise and timesteps; by default 42, as in musubi-tuner's guides."""
    fp8_base: bool = False
    """Keep the weights of the DiT in 8 bits."""
    fp8_scaled: bool = shaped(False, Shapes("weights", applies=[_SCALED]))
    """Scale the 8-bit weights block by block; needs `fp8_base`. Krea 2 and HiDream O1 need both
    keys, HunyuanVideo has only `fp8_base`, Ideogram 4 has neither."""
    logging: Logging = True
    """Write TensorBoard scalars to `runs/{run}/logs`."""
    save_every_n_epochs: Number | None = shaped(None, MACHINE, ge=1)
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
    samples: MusubiSamples = MusubiSamples()
    """[Samples](samples.md) drawn during the training; none without `prompts`."""

    _fits = model_validator(mode="after")(_refuse_decided)


def shaping_settings(trainer: Trainer, lora: str) -> dict[str, Any]:
    """Return the settings that shape the weights.

    Keys that earlier releases did not have are left out if they have no effect, because their
    records lack them.

    Args:
        trainer: section of the trainer.
        lora: module of the default network.
    """
    settings = shaping(trainer, "weights")
    if settings["network_module"] in (None, lora):
        del settings["network_module"]
    if not settings["network_args"]:
        del settings["network_args"]
    return settings


if TYPE_CHECKING:
    TrainingScript = str
else:  # pydantic refuses any other name
    _SCRIPTS = dict.fromkeys(name for row in SDSCRIPTS.values() for name in row.training_scripts)
    TrainingScript = Literal[tuple(_SCRIPTS)]

OF_CAPTIONS = frozenset(
    {"--shuffle_caption", "--caption_dropout_rate", "--caption_dropout_every_n_epochs"}
    | {"--caption_tag_dropout_rate", "--token_warmup_min", "--token_warmup_step"}
    | {"--caption_prefix", "--caption_suffix", "--enable_wildcard", "--secondary_separator"}
    | {"--keep_tokens", "--keep_tokens_separator", "--caption_separator", "--weighted_captions"}
    | {"--train_text_encoder"}
)
"""Flags of sd-scripts' training scripts that cached text forbids or leaves without effect."""


class SdScriptsTrainer(Trainer):
    """Models that sd-scripts trains, from caches in its layout."""

    layout: ClassVar[str] = "sdscripts"
    holds_out: ClassVar[bool] = True
    network: ClassVar[str] = "checkpoint"
    absent: ClassVar[Mapping[str, str]] = {}

    kind: Literal["sdscripts"]
    """The trainer: `sdscripts`."""
    script: TrainingScript | None = None
    """Training script of sd-scripts; by default the one that trains a LoRA. `fine_tune` (`sd1`,
    `sd2`) and `sdxl_train` train the complete network."""
    network_dim: Rank = 16
    """Rank of the LoRA. The default is 32 for `sdxl`, 8 for `lumina` and `anima`, else 16."""
    network_alpha: Alpha = None
    """Scale of the LoRA, which is multiplied by `network_alpha / network_dim`. `null` is the rank.
    The default is half of the rank for `sdxl`, the rank for `lumina`, else 1."""
    network_module: NetworkModule | None = None
    """Module that makes the network to train, such as `networks.dylora`, or `lycoris.kohya` of the
    package `lycoris-lora`; by default that of the architecture's LoRA. sd-scripts or its
    environment must have it. Not with a `script` that trains the complete network."""
    network_args: Listed[Annotated[str, StringConstraints(pattern=NETWORK_ARG)]] = Field([])
    """Arguments of that module, such as `[conv_dim=4, conv_alpha=1]` for a LoCon, or `[algo=loha]`
    for `lycoris.kohya`."""
    v_parameterization: bool | None = shaped(None, Shapes("weights", applies=[_PREDICTS]))
    """Whether the network predicts v instead of the noise. By default the model's files tell: the
    scheduler of a folder, a tensor or the metadata of a single file, and the architecture. A single
    file of `sd2` often does not. For `sd1`, `sd2` and `sdxl`."""
    zero_terminal_snr: bool | None = shaped(None, Shapes("weights", applies=[_PREDICTS]))
    """Rescale the noise schedule so that its last timestep is noise only. By default the model's
    files tell. A network that predicts the noise cannot learn it. For `sd1`, `sd2` and `sdxl`."""
    network_train_unet_only: bool = False
    """Do not train a LoRA for the text encoder of `sd1` and `sd2`. With cached text it is never
    trained."""
    learning_rate: LearningRate = 1e-4
    """Learning rate. The default is 1e-4 for a LoRA and 1e-5 for a complete network."""
    optimizer_type: str = Field("AdamW", min_length=1)
    """Optimizer. `AdamW8bit` needs bitsandbytes in the environment of sd-scripts."""
    lr_scheduler: str = Field("constant", min_length=1)
    """LR scheduler."""
    max_train_epochs: Steps | None = None
    """Epochs; by default 10, if `max_train_steps` is not set."""
    max_train_steps: Steps | None = shaped(None, Shapes("weights", applies=[_NOT_BOTH]))
    """Steps, instead of epochs."""
    train_batch_size: BatchSize = 1
    """Items of a training step. A batch holds items of one shape."""
    gradient_accumulation_steps: BatchSize = 1
    """Batches whose gradients are accumulated before an optimizer step."""
    max_data_loader_n_workers: Workers = 2
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
    dynamo_backend: str | None = shaped(None, Shapes("weights", applies=[_COMPILED]), min_length=1)
    """Backend of `torch.compile`; by default `inductor`."""
    deepspeed: bool = False
    """Train with DeepSpeed ZeRO, which the environment of sd-scripts must have."""
    zero_stage: Number = shaped(2, Shapes("weights", applies=[_STAGED]), ge=0, le=3)
    """Stage of DeepSpeed ZeRO."""
    seed: ProgramSeed = 0
    """Seed of order, noise and timesteps."""
    prior_loss_weight: PriorLossWeight = 1.0
    """Factor of the loss of images of datasets with [`is_reg`](datasets.md#is_reg)."""
    save_every_n_epochs: Number | None = shaped(None, MACHINE, ge=1)
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
    samples: LaunchedSamples = LaunchedSamples()
    """[Sample pictures](samples.md) drawn during the training; none without `prompts`."""

    _fits = model_validator(mode="after")(_refuse_decided)
