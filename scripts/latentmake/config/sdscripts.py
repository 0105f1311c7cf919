"""Rows of sd-scripts' architectures: names of its caches, its scripts, and its own encoders.

One `Strategies` says all that differs between architectures; layout, checks, launch and publication
ask it. Sources: sd-scripts' library/strategy_*.py and the `load_target_model` of its training
scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from latentmake.config.scripts import File

__all__ = ["SDSCRIPTS", "Call", "Encoder", "Network", "Option", "Strategies", "options_in"]


class Call(NamedTuple):
    """A call of one of sd-scripts' own functions or classes.

    Attributes:
        name: with its module: `library.lumina_util.load_ae`.
        arguments: fixed ones, by their names.
    """

    name: str
    arguments: Mapping[str, str | bool | None] = {}


class Network(NamedTuple):
    """A network that encodes, and the call that loads it.

    Attributes:
        key: the model's key that names its weights; `text.1` for the second text encoder.
        load: the call, which gets the path besides.
        path: name of the argument that gets the path.
        marks: parts of names of tensors, one of which is in its file.
        dtype: that it computes in whatever the model says; None: the model's.
        takes_dtype: whether the call has an argument `dtype`.
        place: where the network stands among the values that are returned; None: it is the value.
    """

    key: str
    load: Call
    path: str
    marks: tuple[str, ...]
    dtype: str | None = None
    takes_dtype: bool = True
    place: int | None = None


class Option(NamedTuple):
    """A flag of the training script that changes caches.

    Attributes:
        argument: name of the argument of the first network's call, or of the tokenizer's.
        kind: of its value. A `flag` has none; the content of a `path` counts, of a `cache` nothing.
    """

    argument: str
    kind: Literal["number", "text", "path", "cache", "flag"] = "number"


def options_in(arguments: Sequence[str], known: Mapping[str, Option]) -> dict[str, object]:
    """Return flag -> value of the options among some arguments.

    Raises:
        ValueError: one is unknown, lacks its value, or has a wrong one.
    """
    found: dict[str, object] = {}
    left = list(arguments)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        option = known.get(flag)
        if option is None:
            names = ", ".join(known) or "none"
            raise ValueError(f"{flag} is no option that caches depend on; known: {names}")
        if option.kind == "flag":
            if equals:
                raise ValueError(f"{flag} takes no value")
            found[flag] = True
            continue
        if not equals:
            if not left:
                raise ValueError(f"{flag} lacks its value")
            value = left.pop(0)
        if option.kind == "number" and not value.isdecimal():
            raise ValueError(f"{flag} takes a number, not {value}")
        found[flag] = int(value) if option.kind == "number" else value
    return found


@dataclass(frozen=True)
class Encoder:
    """Encoders of one kind of caches, by sd-scripts' own classes.

    Attributes:
        strategy: class that makes a cache file.
        networks: that encode, in the order that the strategy takes them.
        arrays: names of the arrays in a file, without the size of latents.
        options: flag of the training script -> what it changes.
        tokenizer: class that makes tokens.
        paths: argument of that class -> the model's key that names the path it gets.
        encoding: class that makes embeddings of tokens.
        autocast: whether it computes under `torch.autocast` of the model's dtype.
        folders: of files of sd-scripts that it reads besides its sources.
    """

    strategy: str
    networks: tuple[Network, ...]
    arrays: tuple[str, ...]
    options: Mapping[str, Option] = field(default_factory=dict)
    tokenizer: Call | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    encoding: str | None = None
    autocast: bool = False
    folders: tuple[str, ...] = ()

    @property
    def fixed(self) -> bool:
        """Whether its dtypes are fixed."""
        return all(network.dtype is not None for network in self.networks)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of sd-scripts that it calls, dotted, sorted."""
        calls = [self.strategy, *(network.load.name for network in self.networks)]
        calls += [call.name for call in (self.tokenizer,) if call] + [self.encoding or ""]
        return tuple(sorted({each.rpartition(".")[0] for each in calls if each}))


@dataclass(frozen=True)
class Strategies:
    """An architecture as sd-scripts knows it.

    Attributes:
        title: as people call it.
        latents_ending: end of the names of its latents.
        scripts: training scripts without endings, the default first.
        network: module of its LoRA.
        marks: parts of names of tensors, one of which is in the network's file.
        text_ending: end of the names of its embeddings; None: it encodes captions as it trains.
        files: weights that the training script takes besides the network.
        insists: whether it loads these even where all is cached.
        folders: their flags that take a folder, too.
        switches: further flags of its training scripts.
        complete: those of its scripts that train the network itself, and no LoRA.
        batches_text: whether they take `--text_encoder_batch_size`.
        pixels: side of a latent, in pixels.
        side: sides of its own encoders' images are multiples of this, in pixels.
        divisor: bucket steps of these must be multiples of this, in pixels.
        channels: of its own encoders' latents.
        caption: bytes of a file of its own encoders' embeddings, about.
        latents: encoder of latents; None: one of ours.
        text: encoder of captions; None: one of ours, or none.
        samples: whether its latents are a sample of the posterior.
    """

    title: str
    latents_ending: str
    scripts: tuple[str, ...]
    network: str
    marks: tuple[str, ...]
    text_ending: str | None = None
    files: tuple[File, ...] = ()
    insists: bool = False
    folders: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    complete: tuple[str, ...] = ()
    batches_text: bool = False
    pixels: int = 8
    side: int = 0
    divisor: int = 0
    channels: int = 0
    caption: int = 0
    latents: Encoder | None = None
    text: Encoder | None = None
    samples: bool = False

    @property
    def defaults(self) -> dict[str, str]:
        """Values of the keys of a model that its own encoders make the caches of."""
        posterior = "sample" if self.samples else "mean"
        own = {"layout": "sdscripts", "encoder": "sdscripts"}
        return {**own, "dtype": "bfloat16", "posterior": posterior}

    def encoder(self, kind: str) -> Encoder | None:
        """Return its own encoder of `latents` or `text`."""
        return self.text if kind == "text" else self.latents


_LATENTS = ("latents", "original_size", "crop_ltrb")

SDSCRIPTS: Mapping[str, Strategies] = {
    "sd1": Strategies(
        "Stable Diffusion 1.x",
        "_sd.npz",
        ("train_network", "fine_tune"),
        "networks.lora",
        ("input_blocks.",),
        complete=("fine_tune",),
    ),
    "sd2": Strategies(
        "Stable Diffusion 2.x",
        "_sd.npz",
        ("train_network", "fine_tune"),
        "networks.lora",
        ("input_blocks.",),
        switches=("--v2",),
        complete=("fine_tune",),
    ),
    "sdxl": Strategies(
        "Stable Diffusion XL",
        "_sdxl.npz",
        ("sdxl_train_network", "sdxl_train"),
        "networks.lora",
        ("input_blocks.",),
        text_ending="_te_outputs.npz",
        complete=("sdxl_train",),
    ),
    "sd3": Strategies(
        "Stable Diffusion 3",
        "_sd3.npz",
        ("sd3_train_network",),
        "networks.lora_sd3",
        ("joint_blocks.",),
        text_ending="_sd3_te.npz",
        files=(File("--clip_l", "text"), File("--clip_g", "text.1"), File("--t5xxl", "text.2")),
        batches_text=True,
    ),
    "flux": Strategies(
        "FLUX.1",
        "_flux.npz",
        ("flux_train_network",),
        "networks.lora_flux",
        ("double_blocks.", "single_transformer_blocks."),
        text_ending="_flux_te.npz",
        files=(File("--ae", "vae"), File("--clip_l", "text"), File("--t5xxl", "text.1")),
        insists=True,
        batches_text=True,
    ),
    "lumina": Strategies(
        "Lumina Image 2.0",
        "_lumina.npz",
        ("lumina_train_network",),
        "networks.lora_lumina",
        ("cap_embedder.",),
        text_ending="_lumina_te.npz",
        files=(File("--gemma2", "text"), File("--ae", "vae")),
        insists=True,
        batches_text=True,
        samples=True,
        side=16,
        divisor=64,  # train_network's, which it asks besides its own
        channels=16,
        caption=2_370_000,
        latents=Encoder(
            "library.strategy_lumina.LuminaLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call("library.lumina_util.load_ae", {"device": "cpu"}),
                    "ckpt_path",
                    ("encoder.down.3.",),
                ),
            ),
            _LATENTS,
        ),
        text=Encoder(
            "library.strategy_lumina.LuminaTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.lumina_util.load_gemma2", {"device": "cpu"}),
                    "ckpt_path",
                    ("post_feedforward_layernorm",),
                ),
            ),
            ("hidden_state", "attention_mask", "input_ids"),
            options={
                "--system_prompt": Option("system_prompt", "text"),
                "--gemma2_max_token_length": Option("max_length"),
                "--tokenizer_cache_dir": Option("tokenizer_cache_dir", "cache"),
            },
            tokenizer=Call(
                "library.strategy_lumina.LuminaTokenizeStrategy",
                {"system_prompt": "", "max_length": None},
            ),
            encoding="library.strategy_lumina.LuminaTextEncodingStrategy",
            autocast=True,
        ),
    ),
    "hunyuan_image": Strategies(
        "HunyuanImage 2.1",
        "_hi.npz",
        ("hunyuan_image_train_network",),
        "networks.lora_hunyuan_image",
        ("byt5_in.",),
        text_ending="_hi_te.npz",
        files=(File("--text_encoder", "text"), File("--byt5", "text.1"), File("--vae", "vae")),
        insists=True,
        batches_text=True,
        pixels=32,
        side=32,
        divisor=64,
        channels=64,
        caption=2_500_000,
        samples=True,
        latents=Encoder(
            "library.strategy_hunyuan_image.HunyuanImageLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call("library.hunyuan_image_vae.load_vae", {"device": "cpu"}),
                    "vae_path",
                    ("encoder.down.5.",),
                    dtype="float16",
                    takes_dtype=False,
                ),
            ),
            _LATENTS,
            options={"--vae_chunk_size": Option("chunk_size")},
        ),
        text=Encoder(
            "library.strategy_hunyuan_image.HunyuanImageTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.hunyuan_image_text_encoder.load_qwen2_5_vl", {"device": "cpu"}),
                    "ckpt_path",
                    ("visual.blocks.",),
                    dtype="bfloat16",
                    place=1,
                ),
                Network(
                    "text.1",
                    Call("library.hunyuan_image_text_encoder.load_byt5", {"device": "cpu"}),
                    "ckpt_path",
                    ("SelfAttention.",),
                    dtype="float16",
                    place=1,
                ),
            ),
            ("vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask"),
            options={"--tokenizer_cache_dir": Option("tokenizer_cache_dir", "cache")},
            tokenizer=Call("library.strategy_hunyuan_image.HunyuanImageTokenizeStrategy"),
            encoding="library.strategy_hunyuan_image.HunyuanImageTextEncodingStrategy",
        ),
    ),
    "anima": Strategies(
        "Anima",
        "_anima.npz",
        ("anima_train_network",),
        "networks.lora_anima",
        ("llm_adapter.", "x_embedder."),
        text_ending="_anima_te.npz",
        files=(File("--qwen3", "text"), File("--vae", "vae")),
        insists=True,
        folders=("--qwen3",),
        batches_text=True,
        side=16,
        divisor=16,
        channels=16,
        caption=2_110_000,
        latents=Encoder(
            "library.strategy_anima.AnimaLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call(
                        "library.qwen_image_autoencoder_kl.load_vae",
                        {"device": "cpu", "disable_mmap": True},
                    ),
                    "vae_path",
                    ("encoder.down_blocks.", "encoder.downsamples."),
                    takes_dtype=False,
                ),
            ),
            _LATENTS,
            options={
                "--vae_chunk_size": Option("spatial_chunk_size"),
                "--vae_disable_cache": Option("disable_cache", "flag"),
            },
        ),
        text=Encoder(
            "library.strategy_anima.AnimaTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.anima_utils.load_qwen3_text_encoder", {"device": "cpu"}),
                    "qwen3_path",
                    ("self_attn.q_norm.",),
                    place=0,
                ),
            ),
            ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask", "caption_dropout_rate"),
            options={
                "--qwen3_max_token_length": Option("qwen3_max_length"),
                "--t5_max_token_length": Option("t5_max_length"),
                "--t5_tokenizer_path": Option("t5_tokenizer_path", "path"),
            },
            tokenizer=Call("library.strategy_anima.AnimaTokenizeStrategy"),
            paths={"qwen3_path": "text"},
            encoding="library.strategy_anima.AnimaTextEncodingStrategy",
            autocast=True,
            folders=("configs/qwen3_06b", "configs/t5_old"),
        ),
    ),
}
"""Name in the configuration -> facts."""
