"""An architecture as sd-scripts knows it: names of its caches, its scripts, and its own encoders.

One `Strategies` says all that differs between architectures; layout, checks, launch and publication
ask it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from latentmake.config.scripts import File, Setting

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
        side: sides of its own encoders' images are multiples of this, in pixels.
        divisor: its default script asks for bucket steps that are multiples of this, in pixels; 0:
            for those that the architecture needs.
        channels: of its own encoders' latents.
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
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batches_text: bool = False
    pixels: int = 8
    side: int = 0
    divisor: int = 0
    channels: int = 0
    latents: Encoder | None = None
    text: Encoder | None = None
    samples: bool = False

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
