"""Model architectures as rows of facts, so that other modules never compare names of models.

The rows are in `sdscripts.yaml` and `musubi.yaml`. An `Architecture` holds all differences between
models; layouts, recipes, launches, checks and publication read it.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py, `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs,
*_cache_*.py and *_train*.py, dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import TypeAdapter

Setting: TypeAlias = str | int | float | bool | list[str] | None
"""Value of a key of a trainer, or of a flag of its script."""

Inputs: TypeAlias = Mapping[str, Mapping[str, int]]
"""Key of an encoder -> end of the name of a weight -> inputs of this weight's layer.

The layers are those of the trained network that take the encoder's output. The number of inputs is
that for one channel of the latents, or for one number of an embedding.
"""

_COMPLETE: Mapping[str, Setting] = {"learning_rate": 1e-5}
"""Source: sd-scripts, docs/fine_tune.md."""


class Vae(NamedTuple):
    """Sizes that distinguish one VAE from another."""

    axes: int  # 2 for pictures, 3 for videos
    channels: int  # channels of the latents
    colours: int = 3  # channels of the input pictures


class File(NamedTuple):
    """File or folder of weights that a script takes."""

    flag: str
    key: str  # key of the model; `text` and `text.1` are the first and second text encoder
    required: bool = True
    kind: str = ""  # kind of network in `models.headers`; "" if it is not checked
    vae: Vae | None = None
    form: Literal["file", "folder", "either"] = "file"


class Recognition(NamedTuple):
    """Facts by which `latentmake init` recognises a model, and its choices for a configuration."""

    network: str = ""  # pattern of the name of one of its tensors; "": that of the trainer
    order: int = 0  # rows with lower numbers are compared first
    word: str = ""  # part of the path; it distinguishes architectures that share a network
    sizes: Mapping[str, int] = {}  # pattern of a tensor's name -> last axis, only in this network
    language_model: int = 3584  # width of the embeddings of its language model
    images: int | tuple[int, int] = 1024  # size that it was made for, in pixels
    clips: tuple[int, int] | None = None  # the same for videos; None: `images`
    tokenizers: tuple[str, ...] = ()  # further folders that may hold its tokenizer
    download: str = ""  # arguments of `hf download` for the model of a new user


# -- musubi-tuner ----------------------------------------------------------------------------------


class Untrained(NamedTuple):
    """Network that no trainer supports: the first axes of a weight, and its error."""

    shape: tuple[int, int]
    what: str
    hint: str


class Version(NamedTuple):
    """Version of an architecture: one value of the model's `task`."""

    latents: tuple[str, ...] = ()  # further arguments of the script that encodes latents
    text: tuple[str, ...] = ()  # further arguments of the script that encodes captions
    training: tuple[str, ...] = ()  # further arguments of the training script
    controls: tuple[int, int | None] = (0, 0)  # fewest and most per item; None: any number
    images: bool = True  # whether items may be images
    videos: bool = False  # whether items may be videos
    needs: tuple[str, ...] = ()  # required keys of the model, besides those of the architecture
    tensors: tuple[str, ...] = ()  # beginnings of tensor names in latents, besides `latents_`
    boundary: int | None = None  # timestep, in thousandths, between the high and low noise networks
    one_frame: bool = False  # `fp_1f_*` keys count, with a control image for each index
    channels: int = 0  # input channels of the network; 0: sizes do not distinguish versions
    width: int = 0  # width of its blocks
    word: str = ""  # part of the path of its network, which has the sizes of another version
    ours: bool = False  # whether Latentmake's own trainer supports it
    small: bool = False  # whether Latentmake's own trainer is chosen if no other is installed

    def caching(self, kind: str) -> tuple[str, ...]:
        """Return the further arguments of the script that encodes `latents` or `text`."""
        return self.text if kind == "text" else self.latents


class Script(NamedTuple):
    """Script of musubi-tuner."""

    name: str
    files: tuple[File, ...] = ()
    dtype_flag: str | None = None  # flag of the dtype to encode in; None if it is fixed
    switches: tuple[tuple[str, str], ...] = ()  # pairs of a flag and the model's key that sets it
    reads_controls: bool = False


class Scripts(NamedTuple):
    """An architecture as musubi-tuner's scripts support it."""

    title: str
    suffix: str  # suffix in names of cache files, without underscores
    header: str  # name of the architecture in headers of cache files
    latents: Script
    text: Script
    training: Script
    network: str  # module of the LoRA
    tensors: tuple[str, ...]  # beginnings of tensor names; a text cache must have all of them
    unknown_to: tuple[str, ...] = ()  # modules of other networks that do not support its layers
    versions: Mapping[str, Version] = {"": Version()}  # the model's `task` -> version
    pixels: int = 8  # pixels of the side of a latent
    rounded: Mapping[str, int] = {}  # argument of the latents script -> multiple of the sides
    frames: int = 4  # frames in each latent frame after the first
    fps: float = 16.0  # frame rate that `source_fps` converts to
    batch: int | None = None  # largest batch size of the training; None: any
    precisions: tuple[str, ...] = ("bf16", "fp16", "no")
    settings: Mapping[str, Setting] = {}  # values in the guide: the trainer's keys, further flags
    sections: bool = False  # whether a clip has latents for each of its sections
    layers: bool = False  # whether an item has several target images
    mark: str = "$^"  # pattern that matches only names of tensors of its DiT
    unread: str = "$^"  # pattern of names in another library, which the scripts do not read
    sized_by: str = ""  # pattern of the name of the weight with width and channels of a version
    untrained: Untrained | None = None
    init: Recognition = Recognition()
    inputs: Mapping[str, Mapping[str, int]] = {}  # see `Inputs`
    reads_scales: bool = False  # whether it reads a DiT in 8 bits with scales
    fp8: tuple[tuple[str, ...], ...] = (("fp8_base",), ("fp8_base", "fp8_scaled"))  # allowed sets
    control_latents: bool = True  # whether each control has a tensor `latents_control`
    # Kind of attention -> largest batch without `--split_attn`; None: any.
    attentions: Mapping[str, int | None] = dict.fromkeys(("sdpa", "flash_attn", "xformers"))
    sized_controls: bool = False  # whether `no_resize_control` and `control_resolution` count
    architecture: Mapping[str, Any] = {}  # fields of `Architecture`, if Latentmake encodes
    scale: tuple[str, str] = ("", "")  # scale of the latents, and its source file; for people
    predicts: str = "flow matching"  # prediction of the network; for people

    @property
    def counts_controls(self) -> bool:
        """Whether latents contain a tensor for each control image."""
        return self.latents.reads_controls and self.control_latents

    def caching(self, kind: str) -> Script:
        """Return the script that caches `latents` or `text`."""
        return self.text if kind == "text" else self.latents


# -- sd-scripts ------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Call of a function or class of sd-scripts."""

    name: str  # name with its module, such as `library.lumina_util.load_ae`
    arguments: Mapping[str, str | bool | None] = {}


class Network(NamedTuple):
    """A network that encodes, and the call that loads it."""

    key: str  # key of the model; `text.1` is the second text encoder
    load: Call
    path: str  # name of the argument that gets the path
    marks: tuple[str, ...]  # parts of tensor names; a file of this network has one of them
    dtype: str | None = None  # fixed dtype; None: the dtype of the model
    takes_dtype: bool = True  # whether the call has an argument `dtype`
    place: int | None = None  # index of the network in the returned tuple; None: no tuple


class Option(NamedTuple):
    """A flag of the training script that changes caches."""

    argument: str  # argument of the call that loads the first network or the tokenizer
    # A `flag` has no value. The content of a `path` counts; a `cache` folder does not count.
    kind: Literal["number", "text", "path", "cache", "flag"] = "number"


def options_in(arguments: Sequence[str], options: Mapping[str, Option]) -> dict[str, object]:
    """Parse arguments of an encoder into flag -> value.

    Args:
        arguments: arguments to parse.
        options: flag -> option of the encoder.

    Raises:
        ValueError: an argument is unknown, lacks its value, or has a wrong value.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, option in options.items():
        if option.kind == "flag":
            parser.add_argument(flag, dest=flag, action="store_true", default=SUPPRESS)
        else:
            kind = int if option.kind == "number" else str
            parser.add_argument(flag, dest=flag, type=kind, default=SUPPRESS)
    try:
        values, others = parser.parse_known_args(list(arguments))
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    if others:
        names = ", ".join(options) or "none"
        raise ValueError(f"{others[0]} is no option that caches depend on; known: {names}")
    return vars(values)


class Encoder(NamedTuple):
    """Encoders of one kind of caches, built from sd-scripts' own classes."""

    strategy: str  # class that makes a cache file
    networks: tuple[Network, ...]  # networks in the order of the strategy's arguments
    arrays: tuple[str, ...]  # names of arrays in a file, without the size of latents
    options: Mapping[str, Option] = {}  # flag of the training script -> option
    tokenizer: Call | None = None
    paths: Mapping[str, str] = {}  # argument of the tokenizer -> the model's key of its path
    encoding: str | None = None  # class that turns tokens into embeddings
    autocast: bool = False  # whether it computes under `torch.autocast` with the model's dtype
    folders: tuple[str, ...] = ()  # folders of sd-scripts with further files that it reads

    @property
    def fixed(self) -> bool:
        """Whether its dtypes are fixed."""
        return all(network.dtype is not None for network in self.networks)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules of sd-scripts that it calls, sorted."""
        calls = [self.strategy, *(network.load.name for network in self.networks)]
        calls += [call.name for call in (self.tokenizer,) if call] + [self.encoding or ""]
        return tuple(sorted({name.rpartition(".")[0] for name in calls if name}))


class Strategies(NamedTuple):
    """An architecture as sd-scripts supports it."""

    title: str
    latents_ending: str
    scripts: tuple[str, ...]  # training scripts without endings, the default first
    network: str  # module of the LoRA
    marks: tuple[str, ...]  # parts of tensor names; a file of the network has one of them
    init: Recognition = Recognition()
    inputs: Mapping[str, Mapping[str, int]] = {}  # see `Inputs`
    reads_scales: bool = False  # whether it reads weights in 8 bits with scales
    text_ending: str | None = None  # None: captions are encoded during the training
    files: tuple[File, ...] = ()  # files of the training script besides the network
    insists: bool = False  # whether the script loads `files` even if everything is cached
    folders: tuple[str, ...] = ()  # flags of `files` that also take a folder
    switches: tuple[str, ...] = ()  # further flags of the training scripts
    complete: tuple[str, ...] = ()  # scripts that train the complete network
    unregularised: tuple[str, ...] = ()  # scripts that refuse regularisation images
    unweighted: tuple[str, ...] = ()  # scripts that ignore `prior_loss_weight`
    settings: Mapping[str, Setting] = {}  # values in the guide: the trainer's keys, further flags
    batches_text: bool = False  # whether the scripts take `--text_encoder_batch_size`
    pixels: int = 8  # pixels of the side of a latent
    divisor: int = 0  # divisor of bucket steps in the default script; 0: `bucket_divisor`
    latents: Encoder | None = None  # None: Latentmake encodes
    text: Encoder | None = None  # None: Latentmake encodes, or there are no text caches
    samples: bool = False  # whether latents are a sample of the posterior
    scale: tuple[str, str] = ("", "")  # see `Scripts`
    # Variant of the weights in a folder that is read with a `mixed_precision` of the same name.
    variant: str | None = None
    architecture: Mapping[str, Any] = {}  # fields of `Architecture`

    @property
    def pattern(self) -> str:
        """Pattern of names of tensors that its trainer reads."""
        return "|".join(map(re.escape, self.marks))

    @property
    def defaults(self) -> dict[str, str]:
        """Default values of a model's keys, if sd-scripts' own encoders make its caches."""
        posterior = "sample" if self.samples else "mean"
        own = {"layout": "sdscripts", "encoder": "sdscripts"}
        return {**own, "dtype": "bfloat16", "posterior": posterior}

    def recommended(self, script: str) -> Mapping[str, Setting]:
        """Return the settings that the guide of a script recommends."""
        return _COMPLETE if script in self.complete else self.settings

    def encoder(self, kind: str) -> Encoder | None:
        """Return sd-scripts' own encoder of `latents` or `text`, if it is used."""
        return self.text if kind == "text" else self.latents


# -- Latentmake ------------------------------------------------------------------------------------


class ClipOutput(NamedTuple):
    """Tensors of a CLIP's output that a cache keeps.

    Attributes:
        layer: layer of the hidden states, counted from the last (1); None: the last layer, after
            the final normalisation.
        normalised: whether the hidden states of `layer` get the final normalisation too.
        pooled: vector of the caption. `own`: the network's own, projected if it has a projection.
            `bare`: the same without projection. `end`: state of the first EOS in the last layer,
            projected. None: no vector.
        projects: whether the network must have a projection.
        padding: token that sd-scripts pads captions with; None: the end of text.
    """

    layer: int | None
    normalised: bool
    pooled: Literal["own", "bare", "end"] | None
    projects: bool = False
    padding: int | None = None


class Architecture(NamedTuple):
    """Facts about one model architecture."""

    name: str  # "" if the model has no `architecture`
    text_encoders: tuple[str, ...] = ()  # kinds of the text encoders, in order
    clips: tuple[ClipOutput, ...] = ()  # outputs to keep of the CLIPs among them
    picks_layer: bool = False  # whether `clip_skip` chooses the layer of CLIP
    masks_clips: bool = False  # whether padding may be hidden from the CLIPs
    chunks_captions: bool = False  # whether CLIP takes captions in chunks of 75 tokens
    caches_text: bool = True  # whether sd-scripts reads embeddings from caches
    single_file: bool = False  # whether sd-scripts reads the network from one file only
    scale: tuple[float, float] | None = None  # shift and factor of latents; None: unscaled
    sized_arrays: bool = False  # whether array names contain the size of the latents
    side: int = 8  # sides of resolutions are multiples of this, in pixels
    bucket_steps: int = 64  # sd-scripts' default for `bucket_reso_steps`
    bucket_divisor: int = 64  # `bucket_reso_steps` must be a multiple of this
    original_files: bool = False  # whether encoders may be files without a configuration
    video: bool = False  # whether its VAE encodes videos, in tiles with `vae_cache_cpu`
    cleans_captions: bool = False  # whether HTML and repeated space are removed (umT5)
    encodes: bool = True  # whether Latentmake has encoders for it
    checkpoints: bool = False  # whether one file may hold VAE, text encoders and UNet
    trainer: str | None = None  # kind of Latentmake's own trainer for it
    usual: bool = False  # whether an imported dataset file is for it, if nothing says which
    channels: int = 4  # channels of its latents
    prediction: str | None = None  # prediction of its networks; None if they differ
    # A network takes (latents - shift_factor) * scaling_factor; None: unknown.
    scaling_factor: float | None = None
    shift_factor: float = 0.0
    scripts: Scripts | None = None  # facts for musubi-tuner
    strategies: Strategies | None = None  # facts for sd-scripts
    init: Recognition = Recognition()  # facts for `latentmake init`

    @property
    def pairs(self) -> bool:
        """Whether a model may have two networks, for high and low noise."""
        return self.scripts is not None and any(x.boundary for x in self.scripts.versions.values())

    @property
    def program(self) -> Scripts | Strategies | None:
        """Facts for musubi-tuner or sd-scripts, whichever trains it."""
        return self.scripts or self.strategies


TEXT_ENCODERS = {
    **{"CLIP-L": ("CLIP text encoder", 768), "OpenCLIP-H": ("CLIP text encoder", 1024)},
    **{"CLIP-G": ("CLIP text encoder", 1280), "T5": ("T5", 32128), "umT5": ("T5", 256384)},
}
"""Name in `text_encoders` -> kind in `models.headers`, and published size.

The size is the width of a CLIP, or the vocabulary of a T5.
"""
GENERIC = Architecture("", checkpoints=True)
"""Facts for a model without `architecture`: caches keep the last layer of each text encoder."""

# The C version is much faster, but some installations of PyYAML lack it.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _rows(file: str) -> dict[str, dict[str, Any]]:
    """Return name -> row of a YAML file.

    A row inherits the values of the row that it is `like`. Names that begin with `_` are only for
    inheritance, and not returned.
    """
    text = Path(__file__).with_name(file).read_text("utf-8")
    written = yaml.load(text, _SafeLoader)  # noqa: S506 -- a safe loader

    def values(name: str) -> dict[str, Any]:
        row = dict(written[name])
        like = row.pop("like", None)
        return _merged(row, values(like)) if like else row

    return {name: values(name) for name in written if name[0] != "_"}


def _merged(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values over those of a base, also in mappings below them."""
    result = {**base, **values}
    for key in values.keys() & base.keys():
        if isinstance(values[key], dict) and isinstance(base[key], dict):
            result[key] = _merged(values[key], base[key])
    return result


def _scripts(name: str, row: dict[str, Any]) -> Scripts:
    """Return a row of musubi-tuner, with its default `header` and the names of its scripts."""
    named: dict[str, Any] = {"header": name}
    if program := row.pop("program", None):
        named |= {part: {"name": f"{program}_{ending}.py"} for part, ending in _ENDINGS.items()}
    return _of_scripts(_merged(row, named))


_of_scripts = TypeAdapter(Scripts).validate_python
_of_strategies = TypeAdapter(Strategies).validate_python
_of_facts = TypeAdapter(Architecture).validate_python
_ENDINGS = {
    "latents": "cache_latents",
    "text": "cache_text_encoder_outputs",
    "training": "train_network",
}
MUSUBI = {name: _scripts(name, row) for name, row in _rows("musubi.yaml").items()}
"""Architectures that musubi-tuner trains. Its scripts make the caches; for Wan, Latentmake can."""
SDSCRIPTS = {name: _of_strategies(row) for name, row in _rows("sdscripts.yaml").items()}
"""Architectures that sd-scripts trains."""


def _architecture(name: str, row: Scripts | Strategies) -> Architecture:
    mark = row.pattern if isinstance(row, Strategies) else row.mark
    init = row.init._replace(network=row.init.network or mark)
    if isinstance(row, Strategies):
        return _of_facts({"name": name, **row.architecture})._replace(strategies=row, init=init)
    side = max(row.pixels, 16)
    videos = any(version.videos for version in row.versions.values())
    facts = {"side": side, "bucket_steps": side, "video": videos, "encodes": False}
    return _of_facts({"name": name, **(row.architecture or facts)})._replace(scripts=row, init=init)


ROWS = {
    **{name: _architecture(name, row) for name, row in SDSCRIPTS.items()},
    **{name: _architecture(name, row) for name, row in MUSUBI.items()},
}
"""Name -> facts, for all architectures."""
WAN = ROWS["wan"]
ARCHITECTURES = {name: row for name, row in ROWS.items() if row is not WAN}
"""Name in the configuration -> facts, without Wan: its models have only a `task`."""


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other name
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
