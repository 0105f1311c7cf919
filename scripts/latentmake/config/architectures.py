"""Model architectures: rows of facts, so that the rest of the package compares no names.

The rows are `sdscripts.yaml` and `musubi.yaml`. One `Architecture` says all that differs between
models; layout, recipe, launch, checks and publication ask it.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py, `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs,
*_cache_*.py and *_train*.py, dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import TypeAdapter

Setting: TypeAlias = str | int | float | bool | list[str] | None
"""Value of a trainer's key, or of a flag of its script."""

Inputs: TypeAlias = Mapping[str, Mapping[str, int]]
"""Key of an encoder -> layers of the trained network that take its output, by the ends of their
weights' names; each with its inputs for one channel of the latents or number of an embedding."""

_COMPLETE: Mapping[str, Setting] = {"learning_rate": 1e-5}
"""Source: sd-scripts, docs/fine_tune.md."""


class Vae(NamedTuple):
    """Sizes that tell one VAE from another."""

    axes: int  # 2 for pictures, 3 for videos
    channels: int  # of its latents
    colours: int = 3  # channels of the pictures that it takes


class File(NamedTuple):
    """A file or folder of weights that a script takes."""

    flag: str
    key: str  # of the model; `text`, `text.1` for the first and second text encoder
    required: bool = True
    kind: str = ""  # as `models.headers` names it; "" where that is not checked
    vae: Vae | None = None
    form: Literal["file", "folder", "either"] = "file"


# -- musubi-tuner ----------------------------------------------------------------------------------


class Version(NamedTuple):
    """Version of an architecture: one value of the model's `task`."""

    latents: tuple[str, ...] = ()  # arguments that it adds to the script of latents
    text: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    controls: tuple[int, int | None] = (0, 0)  # fewest and most of an item; None: any number
    images: bool = True  # whether items may be images
    videos: bool = False
    needs: tuple[str, ...] = ()  # keys of the model, besides those of the architecture
    tensors: tuple[str, ...] = ()  # beginnings of names in latents, besides `latents_`
    boundary: int | None = None  # thousandths; between networks for high and for low noise
    one_frame: bool = False  # a dataset's `fp_1f_*` count, with a control image for each index

    def caching(self, kind: str) -> tuple[str, ...]:
        """Return the arguments that it adds to the script of `latents` or `text`."""
        return self.text if kind == "text" else self.latents


class Script(NamedTuple):
    """One of musubi-tuner's scripts."""

    name: str
    files: tuple[File, ...] = ()
    dtype_flag: str | None = None  # None where the dtype that it encodes in is fixed
    switches: tuple[tuple[str, str], ...] = ()  # flags, each with the model's key that sets it
    reads_controls: bool = False


class Scripts(NamedTuple):
    """An architecture as musubi-tuner knows it."""

    title: str
    suffix: str  # of the names of its cache files, without underscores
    header: str  # its name in their headers
    latents: Script
    text: Script
    training: Script
    network: str  # module of its LoRA
    tensors: tuple[str, ...]  # beginnings of names, all of which a cache of text holds
    unknown_to: tuple[str, ...] = ()  # modules of other networks that do not know its layers
    versions: Mapping[str, Version] = {"": Version()}  # by the model's `task`
    pixels: int = 8  # side of a latent
    rounded: Mapping[str, int] = {}  # arguments of the script of latents -> sides are multiples
    frames: int = 4  # of a latent after the first
    fps: float = 16.0  # which `source_fps` converts to
    batch: int | None = None  # most items of a batch of its training
    precisions: tuple[str, ...] = ("bf16", "fp16", "no")
    settings: Mapping[str, Setting] = {}  # of its guide: keys of the trainer, and further flags
    sections: bool = False  # a clip has latents for each section of `fp_latent_window_size`
    layers: bool = False  # an item has several target images
    mark: str = "$^"  # pattern that only names of tensors of its DiT match
    inputs: Mapping[str, Mapping[str, int]] = {}  # see `Inputs`
    reads_scales: bool = False  # whether it reads a DiT in 8 bits with scales
    fp8: tuple[tuple[str, ...], ...] = (("fp8_base",), ("fp8_base", "fp8_scaled"))  # together
    control_latents: bool = True  # each control has a tensor `latents_control`
    # The largest batch of each attention without `--split_attn`; None: any.
    attentions: Mapping[str, int | None] = dict.fromkeys(("sdpa", "flash_attn", "xformers"))
    sized_controls: bool = False  # `no_resize_control` and `control_resolution` count
    architecture: Mapping[str, Any] = {}  # fields of `Architecture`, where encoders are ours
    scale: tuple[str, str] = ("", "")  # of its latents, for people; its file with these numbers
    predicts: str = "flow matching"  # of its network, for people

    @property
    def counts_controls(self) -> bool:
        """Whether latents hold a tensor for each control image."""
        return self.latents.reads_controls and self.control_latents

    def caching(self, kind: str) -> Script:
        """Return the script that caches `latents` or `text`."""
        return self.text if kind == "text" else self.latents


# -- sd-scripts ------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of one of sd-scripts' own functions or classes."""

    name: str  # with its module: `library.lumina_util.load_ae`
    arguments: Mapping[str, str | bool | None] = {}


class Network(NamedTuple):
    """A network that encodes, and the call that loads it."""

    key: str  # of the model; `text.1` for the second text encoder
    load: Call
    path: str  # name of the argument that gets the path
    marks: tuple[str, ...]  # parts of names of tensors, one of which is in its file
    dtype: str | None = None  # whatever the model says; None: the model's
    takes_dtype: bool = True  # whether the call has an argument `dtype`
    place: int | None = None  # among the values that are returned; None: the network alone is


class Option(NamedTuple):
    """A flag of the training script that changes caches."""

    argument: str  # of the first network's call, or of the tokenizer's
    # A `flag` has no value; the content of a `path` counts, of a `cache` nothing.
    kind: Literal["number", "text", "path", "cache", "flag"] = "number"


def options_in(arguments: Sequence[str], known: Mapping[str, Option]) -> dict[str, object]:
    """Return flag -> value of the options among some arguments.

    Raises:
        ValueError: one is unknown, lacks its value, or has a wrong one.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, option in known.items():
        if option.kind == "flag":
            parser.add_argument(flag, dest=flag, action="store_true", default=SUPPRESS)
        else:
            kind = int if option.kind == "number" else str
            parser.add_argument(flag, dest=flag, type=kind, default=SUPPRESS)
    try:
        found, others = parser.parse_known_args(list(arguments))
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    if others:
        names = ", ".join(known) or "none"
        raise ValueError(f"{others[0]} is no option that caches depend on; known: {names}")
    return vars(found)


class Encoder(NamedTuple):
    """Encoders of one kind of caches, by sd-scripts' own classes."""

    strategy: str  # class that makes a cache file
    networks: tuple[Network, ...]  # in the order that the strategy takes them
    arrays: tuple[str, ...]  # names in a file, without the size of latents
    options: Mapping[str, Option] = {}  # by flag of the training script
    tokenizer: Call | None = None
    paths: Mapping[str, str] = {}  # argument of the tokenizer -> the model's key of its path
    encoding: str | None = None  # class that makes embeddings of tokens
    autocast: bool = False  # whether it computes under `torch.autocast` of the model's dtype
    folders: tuple[str, ...] = ()  # of files that it reads besides its sources

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


class Strategies(NamedTuple):
    """An architecture as sd-scripts knows it."""

    title: str
    latents_ending: str
    scripts: tuple[str, ...]  # training scripts without endings, the default first
    network: str  # module of its LoRA
    marks: tuple[str, ...]  # parts of names of tensors, one of which is in the network's file
    inputs: Mapping[str, Mapping[str, int]] = {}  # see `Inputs`
    reads_scales: bool = False
    text_ending: str | None = None  # None: it encodes captions as it trains
    files: tuple[File, ...] = ()  # that the training script takes besides the network
    insists: bool = False  # whether it loads these even where all is cached
    folders: tuple[str, ...] = ()  # their flags that take a folder, too
    switches: tuple[str, ...] = ()  # further flags of its training scripts
    complete: tuple[str, ...] = ()  # those of its scripts that train no LoRA
    unregularised: tuple[str, ...] = ()  # those that refuse regularisation images
    unweighted: tuple[str, ...] = ()  # those that ignore `prior_loss_weight`
    settings: Mapping[str, Setting] = {}  # of its guide: keys of the trainer, and further flags
    batches_text: bool = False  # whether they take `--text_encoder_batch_size`
    pixels: int = 8  # side of a latent
    divisor: int = 0  # of bucket steps in its default script; 0: as the architecture needs
    latents: Encoder | None = None  # None: one of ours
    text: Encoder | None = None  # None: one of ours, or none
    samples: bool = False  # whether its latents are a sample of the posterior
    scale: tuple[str, str] = ("", "")  # as of `Scripts`
    # Variant of the weights in a folder that `mixed_precision` of the same name reads.
    variant: str | None = None
    architecture: Mapping[str, Any] = {}  # fields of `Architecture`

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


# -- Latentmake ------------------------------------------------------------------------------------


class ClipOutput(NamedTuple):
    """Tensors kept of a CLIP's output.

    `pooled` is the vector of the caption: `own`, the one that the network itself takes, projected
    where it projects; `bare`, the same never projected; `end`, the last layer's state of the first
    EOS, projected; None: no vector.
    """

    layer: int | None  # whose hidden states, counted from the last (1); None: the last, normalised
    normalised: bool  # whether those go through the final normalisation too
    pooled: Literal["own", "bare", "end"] | None
    projects: bool = False  # whether the network must have a projection
    padding: int | None = None  # token that sd-scripts pads captions with; None: the end of text


class Architecture(NamedTuple):
    """Facts about one model architecture."""

    name: str  # "" for a model that names none
    text_encoders: tuple[str, ...] = ()  # what each is, in order
    clips: tuple[ClipOutput, ...] = ()  # of each CLIP among them
    picks_layer: bool = False  # whether `clip_skip` chooses the layer of CLIP
    masks_clips: bool = False  # whether padding may be hidden from its CLIPs
    chunks_captions: bool = False  # whether CLIP takes captions in chunks of 75 tokens
    caches_text: bool = True  # whether sd-scripts reads embeddings from caches
    single_file: bool = False  # whether sd-scripts reads the network from one file only
    scale: tuple[float, float] | None = None  # shift and factor of latents; None: unscaled
    sized_arrays: bool = False  # whether names of arrays contain the size of the latents
    side: int = 8  # sides of resolutions are multiples of this, in pixels
    bucket_steps: int = 64  # sd-scripts' default for `bucket_reso_steps`
    bucket_divisor: int = 64  # `bucket_reso_steps` must be a multiple of this
    original_files: bool = False  # whether encoders may be files without a configuration
    video: bool = False  # whether its VAE encodes videos, in tiles with `vae_cache_cpu`
    cleans_captions: bool = False  # of HTML and repeated blanks (umT5)
    encodes: bool = True  # whether there are encoders of ours
    checkpoints: bool = False  # whether one file may hold VAE, text encoders and UNet
    prediction: str | None = None  # of its networks; None where they differ
    scaling_factor: float | None = None  # of its latents, as a network takes them; None: unknown
    shift_factor: float = 0.0  # likewise: (latents - shift) * factor
    scripts: Scripts | None = None  # what musubi-tuner knows about it
    strategies: Strategies | None = None  # what sd-scripts knows about it


GENERIC = Architecture("", checkpoints=True)
"""A model that names no architecture: the last layer of each text encoder is kept."""

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C where it can be


def _rows(file: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a YAML file by their names.

    A row has the values of the row that it is `like`, except where it sets its own. Names that
    begin with `_` are no rows.
    """
    text = Path(__file__).with_name(file).read_text("utf-8")
    written = yaml.load(text, _SafeLoader)  # noqa: S506 -- it is safe

    def values(name: str) -> dict[str, Any]:
        row = dict(written[name])
        like = row.pop("like", None)
        return _laid_over(row, values(like)) if like else row

    return {name: values(name) for name in written if name[0] != "_"}


def _laid_over(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of a base where there are none."""
    inner = {
        key: _laid_over(values[key], base[key])
        for key in values.keys() & base.keys()
        if isinstance(values[key], dict) and isinstance(base[key], dict)
    }
    return {**base, **values, **inner}


def _scripts(name: str, row: dict[str, Any]) -> Scripts:
    """Return a row of musubi-tuner with the names that its own and its `program` stand for."""
    named: dict[str, Any] = {"header": name}
    if program := row.pop("program", None):
        named |= {part: {"name": f"{program}_{ending}.py"} for part, ending in _ENDINGS.items()}
    return _of_scripts(_laid_over(row, named))


_of_scripts = TypeAdapter(Scripts).validate_python
_of_strategies = TypeAdapter(Strategies).validate_python
_of_facts = TypeAdapter(Architecture).validate_python
_ENDINGS = {
    "latents": "cache_latents",
    "text": "cache_text_encoder_outputs",
    "training": "train_network",
}
MUSUBI = {name: _scripts(name, row) for name, row in _rows("musubi.yaml").items()}
"""Architectures whose caches musubi-tuner's own scripts make; and Wan, whose caches may be ours."""
SDSCRIPTS = {name: _of_strategies(row) for name, row in _rows("sdscripts.yaml").items()}
"""Architectures that sd-scripts trains."""


def _of_row(name: str, row: Scripts | Strategies) -> Architecture:
    if isinstance(row, Strategies):
        return _of_facts({"name": name, **row.architecture})._replace(strategies=row)
    side = max(row.pixels, 16)
    videos = any(version.videos for version in row.versions.values())
    facts = {"side": side, "bucket_steps": side, "video": videos, "encodes": False}
    return _of_facts({"name": name, **(row.architecture or facts)})._replace(scripts=row)


ARCHITECTURES = {
    **{name: _of_row(name, row) for name, row in SDSCRIPTS.items()},
    **{name: _of_row(name, row) for name, row in MUSUBI.items()},
}
"""Name in the configuration -> facts. A Wan model has a `task` in place of a name."""
WAN = ARCHITECTURES.pop("wan")


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
