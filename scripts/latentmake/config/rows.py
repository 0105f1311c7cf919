"""Rows of architectures: what musubi-tuner's scripts and sd-scripts' strategies know of each.

One `Scripts` or `Strategies` says all that differs between architectures whose caches other
trainers make; layout, recipe, launch, checks and publication ask it. Sources: musubi-tuner's
*_cache_*.py and *_train*.py, dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict

from latentmake.config.weights import Version

Setting: TypeAlias = str | int | float | bool | list[str] | None
"""Value of a trainer's key, or of a flag of its script."""

ATTENTIONS: Mapping[str, int | None] = dict.fromkeys(("sdpa", "flash_attn", "xformers"))
"""Attentions of most networks, for batches of any size."""


_CLOSED: ConfigDict = {"extra": "forbid"}


class Vae(NamedTuple):
    """Sizes that tell one VAE from another.

    Attributes:
        axes: 2 for pictures, 3 for videos.
        channels: of its latents.
        colours: channels of the pictures that it takes.
    """

    axes: int
    channels: int
    colours: int = 3


class File(NamedTuple):
    """A file or folder of weights that a script takes.

    Attributes:
        flag: its flag, `--vae`.
        key: the model's key that names it; `text`, `text.1` for the first and second text encoder.
        required: whether the script refuses to run without it.
        kind: what it holds, as `models.kinds` names it; "" where that is not checked.
        vae: sizes of a VAE.
        form: what its path may be.
    """

    flag: str
    key: str
    required: bool = True
    kind: str = ""
    vae: Vae | None = None
    form: Literal["file", "folder", "either"] = "file"


@dataclass(frozen=True)
class Script:
    """One of musubi-tuner's scripts.

    Attributes:
        name: its file's name.
        files: weights that it takes.
        dtype_flag: flag of the dtype that it encodes in; None where that is fixed.
        switches: flags, each with the key of the model that sets it.
        reads_controls: whether what it makes depends on the control images.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: str
    files: tuple[File, ...] = ()
    dtype_flag: str | None = None
    switches: tuple[tuple[str, str], ...] = ()
    reads_controls: bool = False


class Rule(NamedTuple):
    """Restriction of a flag that a training script knows.

    Attributes:
        flag: the flag.
        values: the values that it takes; none: it refuses the flag; None: it takes any.
        most: the largest number that it takes.
        needs: flags that must stand beside it.
        without: flags that must not.
    """

    flag: str
    values: tuple[str, ...] | None = None
    most: int | None = None
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scripts:
    """An architecture as musubi-tuner knows it.

    Attributes:
        title: as people call it.
        suffix: of the names of its cache files, without underscores.
        header: its name in their headers.
        latents: the script that caches latents.
        text: the script that caches embeddings.
        training: the script that trains.
        network: module of its LoRA.
        tensors: beginnings of names of tensors, all of which a cache of text holds.
        versions: what the model's `task` may be; "" where it has none.
        pixels: side of a latent, in pixels.
        rounded: arguments of the script of latents, each with the multiples, in pixels, that sides
            are enlarged to.
        frames: frames of a latent after the first.
        fps: frames a second of its videos, which `source_fps` converts to.
        batch: most items of a batch of its training; None for any number.
        precisions: what `mixed_precision` may be.
        settings: values that its guide recommends for the trainer's keys, and for further flags of
            the training script (`--lr_scheduler`).
        sections: whether a clip has a file of latents for each section of `fp_latent_window_size`.
        layers: whether an item has several target images, its layers.
        mark: pattern that only names of tensors of its DiT match.
        channels: kind of latents -> channels; of kinds that are not here they are not known.
        fp8: keys of the trainer that may be set together to keep weights in 8 bits.
        rules: what the training script refuses.
        control_latents: whether each control has a tensor `latents_control`; else others hold it.
        attentions: value of the trainer's `attention` -> the largest batch that it takes without
            `--split_attn`; None: any.
        stamp: entry that the header of its DiT's file must have; None where none is demanded.
        sized_controls: whether control images may have sizes of their own: `no_resize_control` and
            `control_resolution` count.
        architecture: fields of `spec.Architecture`, where encoders of ours make its caches.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    title: str
    suffix: str
    header: str
    latents: Script
    text: Script
    training: Script
    network: str
    tensors: tuple[str, ...]
    versions: Mapping[str, Version] = field(default_factory=lambda: {"": Version()})
    pixels: int = 8
    rounded: Mapping[str, int] = field(default_factory=dict)
    frames: int = 4
    fps: float = 16.0
    batch: int | None = None
    precisions: tuple[str, ...] = ("bf16", "fp16", "no")
    settings: Mapping[str, Setting] = field(default_factory=dict)
    sections: bool = False
    layers: bool = False
    mark: str = "$^"
    channels: Mapping[str, int] = field(default_factory=dict)
    fp8: tuple[tuple[str, ...], ...] = (("fp8_base",), ("fp8_base", "fp8_scaled"))
    rules: tuple[Rule, ...] = ()
    control_latents: bool = True
    stamp: tuple[str, str] | None = None
    attentions: Mapping[str, int | None] = field(default_factory=lambda: dict(ATTENTIONS))
    sized_controls: bool = False
    architecture: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts_controls(self) -> bool:
        """Whether latents hold a tensor for each control image."""
        return self.latents.reads_controls and self.control_latents

    def caching(self, kind: str) -> Script:
        """Return the script that caches `latents` or `text`."""
        return self.text if kind == "text" else self.latents


_COMPLETE: Mapping[str, Setting] = {"learning_rate": 1e-5}
"""Source: sd-scripts, docs/fine_tune.md."""


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
        if option.kind == "number" and not (value.isascii() and value.isdecimal()):
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

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

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
        settings: values that the guide of its default script recommends for the trainer's keys, and
            for further flags of that script (`--guidance_scale`).
        batches_text: whether they take `--text_encoder_batch_size`.
        pixels: side of a latent, in pixels.
        divisor: its default script asks for bucket steps that are multiples of this, in pixels; 0:
            for those that the architecture needs.
        channels: of its own encoders' latents.
        latents: encoder of latents; None: one of ours.
        text: encoder of captions; None: one of ours, or none.
        samples: whether its latents are a sample of the posterior.
        architecture: fields of `spec.Architecture`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

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
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batches_text: bool = False
    pixels: int = 8
    divisor: int = 0
    channels: int = 0
    latents: Encoder | None = None
    text: Encoder | None = None
    samples: bool = False
    architecture: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, str]:
        """Values of the keys of a model that its own encoders make the caches of."""
        posterior = "sample" if self.samples else "mean"
        own = {"layout": "sdscripts", "encoder": "sdscripts"}
        return {**own, "dtype": "bfloat16", "posterior": posterior}

    def recommended(self, script: str) -> Mapping[str, Setting]:
        """Return the settings that the guide of one of its scripts recommends."""
        return _COMPLETE if script in self.complete else self.settings

    def encoder(self, kind: str) -> Encoder | None:
        """Return its own encoder of `latents` or `text`."""
        return self.text if kind == "text" else self.latents
