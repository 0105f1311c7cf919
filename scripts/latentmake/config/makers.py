"""Records of facts about model architectures.

A row of `config.architectures` is one of them: an architecture as Latentmake, musubi-tuner's
scripts or sd-scripts' classes support it. Layouts, recipes, launches, checks and publication ask
it.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, cast

from pydantic import BaseModel

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


class Architecture(BaseModel, frozen=True, extra="forbid"):
    """Facts about one model architecture, its encoders and its trainers.

    `Scripts` and `Strategies` add those for musubi-tuner and sd-scripts. This class itself stands
    for models without an `architecture`, for which only Latentmake has encoders.
    """

    caption_dtype: ClassVar[Literal["bfloat16"] | None] = None  # only dtype of embeddings, if fixed

    name: str = ""  # "" if the model has no `architecture`
    title: str = ""  # its name for people
    encodes: bool = True  # whether Latentmake has encoders for it
    text_encoders: tuple[str, ...] = ()  # kinds of the text encoders, in order
    clips: tuple[ClipOutput, ...] = ()  # outputs to keep of the CLIPs among them
    picks_layer: bool = False  # whether `clip_skip` chooses the layer of CLIP
    masks_clips: bool = False  # whether padding may be hidden from the CLIPs
    chunks_captions: bool = False  # whether CLIP takes captions in chunks of 75 tokens
    cleans_captions: bool = False  # whether HTML and repeated space are removed (umT5)
    caches_text: bool = True  # whether sd-scripts reads embeddings from caches
    single_file: bool = False  # whether sd-scripts reads the network from one file only
    npz_scale: tuple[float, float] = (0.0, 1.0)  # shift and factor of latents in npz files
    sized_arrays: bool = False  # whether array names contain the size of the latents
    side: int = 8  # sides of resolutions are multiples of this, in pixels
    bucket_steps: int = 64  # sd-scripts' default for `bucket_reso_steps`
    bucket_divisor: int = 64  # `bucket_reso_steps` must be a multiple of this
    original_files: bool = False  # whether encoders may be files without a configuration
    checkpoints: bool = False  # whether one file may hold VAE, text encoders and UNet
    trainer: str | None = None  # kind of Latentmake's own trainer for it
    usual: bool = False  # whether an imported dataset file is for it, if nothing says which
    channels: int = 4  # channels of its latents
    prediction: str | None = None  # prediction of its networks; None if they differ
    # A network takes (latents - shift_factor) * scaling_factor; None: unknown.
    scaling_factor: float | None = None
    shift_factor: float = 0.0
    network: str = ""  # module of the LoRA in the program; "" without a program
    pixels: int = 8  # pixels of the side of a latent
    # Tensors in the files of its program; None and {} if they are unknown or depend on the caption.
    cached_latents: tuple[str, int] | None = None  # dtype, unless `vae_dtype` is set, and channels
    cached_text: Mapping[str, tuple[str | int, ...]] = {}  # tensor -> dtype and shape
    inputs: Inputs = {}
    reads_scales: bool = False  # whether it reads a network in 8 bits with scales
    settings: Mapping[str, Setting] = {}  # values in the guide: the trainer's keys, further flags
    versions: Mapping[str, Version] = {}  # the model's `task` -> version
    sections: bool = False  # whether a clip has latents for each of its sections
    layers: bool = False  # whether an item has several target images
    sized_controls: bool = False  # whether `no_resize_control` and `control_resolution` count
    insists: bool = False  # whether the script loads `files` even if everything is cached
    scale: tuple[str, str] = ("", "")  # scale of the latents, and its source file; for people
    predicts: str = "flow matching"  # prediction of the network; for people
    init: Recognition = Recognition()
    unread: str = "$^"  # pattern of names in another library, which the program does not read
    sized_by: str = ""  # pattern of the name of the weight with width and channels of a version
    untrained: Untrained | None = None

    @property
    def scripts(self) -> Scripts:
        """Facts for musubi-tuner, which must train the architecture."""
        return cast("Scripts", self)

    @property
    def strategies(self) -> Strategies:
        """Facts for sd-scripts, which must train the architecture."""
        return cast("Strategies", self)

    @property
    def pattern(self) -> str:
        """Pattern of names of tensors that its trainer reads."""
        return "$^"

    @property
    def has_tasks(self) -> bool:
        """Whether a model's `task` chooses a version, as with all of musubi-tuner."""
        return bool(self.versions)

    @property
    def video(self) -> bool:
        """Whether its VAE encodes videos."""
        return any(version.videos for version in self.versions.values())

    @property
    def pairs(self) -> bool:
        """Whether a model may have two networks, for high and low noise."""
        return any(version.boundary for version in self.versions.values())

    @property
    def encodes_pictures(self) -> bool:
        """Whether Latentmake encodes its pictures with an AutoencoderKL, and captions with CLIP."""
        return self.encodes and not self.has_tasks

    @property
    def encoders(self) -> tuple[str, ...]:
        """Programs that can encode, as values of the model's `encoder`."""
        return ("latentmake",)

    @property
    def trainers(self) -> Mapping[str, str]:
        """Layout of caches -> usual kind of a trainer that reads them."""
        return {"plain": "sd", "sdscripts": "sdscripts"}

    @property
    def defaults(self) -> Mapping[str, str]:
        """Default values of a model's keys."""
        return {}

    @property
    def fixes_dtype(self) -> bool:
        """Whether the program decides about `dtype`."""
        return False

    @property
    def program_files(self) -> tuple[File, ...]:
        """Weights that the program reads, besides a network of sd-scripts."""
        return ()

    @property
    def latents_names(self) -> str:
        """Pattern of the ends of names of latents, as `Path.glob` takes it."""
        return ""

    @property
    def needs(self) -> Sequence[str]:
        """Keys of weights that every model must have."""
        return ("vae", "text")

    @property
    def text_counts(self) -> tuple[int, int] | None:
        """Fewest and most text encoders; None if the program does not say."""
        return None

    def version(self, task: str | None) -> Version:
        """Return the version that a model's `task` names; the default one of other programs."""
        return self.versions.get(task or "", Version())

    def encoder_files(self, kind: str) -> tuple[File, ...]:
        """Return the weights that a script reads to encode `latents` or `text`."""
        return ()

    def encoder(self, kind: str) -> Encoder | None:
        """Return sd-scripts' own encoder of `latents` or `text`, if it is used."""
        return None

    def takes_dtype(self, kind: str, text_dtype: str | None) -> bool:
        """Whether the dtype of `latents` or `text` can be set; `text_dtype` is the given one."""
        return True


# -- musubi-tuner ----------------------------------------------------------------------------------


class Script(NamedTuple):
    """Script of musubi-tuner."""

    name: str
    files: tuple[File, ...] = ()
    dtype_flag: str | None = None  # flag of the dtype to encode in; None if it is fixed
    switches: tuple[tuple[str, str], ...] = ()  # pairs of a flag and the model's key that sets it
    reads_controls: bool = False


class Scripts(Architecture, frozen=True):
    """An architecture as musubi-tuner's scripts support it."""

    caption_dtype = "bfloat16"

    title: str
    encodes: bool = False
    suffix: str  # suffix in names of cache files, without underscores
    header: str  # name of the architecture in headers of cache files
    latents: Script
    text: Script
    training: Script
    network: str
    tensors: tuple[str, ...]  # beginnings of tensor names; a text cache must have all of them
    unknown_to: tuple[str, ...] = ()  # modules of other networks that do not support its layers
    versions: Mapping[str, Version] = {"": Version()}
    rounded: Mapping[str, int] = {}  # argument of the latents script -> multiple of the sides
    frames: int = 4  # frames in each latent frame after the first
    fps: float = 16.0  # frame rate that `source_fps` converts to
    batch: int | None = None  # largest batch size of the training; None: any
    precisions: tuple[str, ...] = ("bf16", "fp16", "no")
    mark: str = "$^"  # pattern that matches only names of tensors of its DiT
    fp8: tuple[tuple[str, ...], ...] = (("fp8_base",), ("fp8_base", "fp8_scaled"))  # allowed sets
    control_latents: bool = True  # whether each control has a tensor `latents_control`
    # Kind of attention -> largest batch without `--split_attn`; None: any.
    attentions: Mapping[str, int | None] = dict.fromkeys(("sdpa", "flash_attn", "xformers"))

    @property
    def pattern(self) -> str:
        return self.mark

    @property
    def counts_controls(self) -> bool:
        """Whether latents contain a tensor for each control image."""
        return self.latents.reads_controls and self.control_latents

    def caching(self, kind: str) -> Script:
        """Return the script that caches `latents` or `text`."""
        return self.text if kind == "text" else self.latents

    @property
    def encoders(self) -> tuple[str, ...]:
        return ("latentmake", "musubi") if self.encodes else ("musubi",)

    @property
    def trainers(self) -> Mapping[str, str]:
        return {"musubi": "wan" if self.encodes else "musubi"}

    @property
    def defaults(self) -> Mapping[str, str]:
        defaults = {"dtype": "bfloat16", "layout": "musubi"}
        if not self.encodes:
            defaults["encoder"] = "musubi"
        only, *others = self.versions
        return {**defaults, "task": only} if only and not others else defaults

    @property
    def fixes_dtype(self) -> bool:
        return True

    @property
    def program_files(self) -> tuple[File, ...]:
        return (*self.latents.files, *self.text.files, *self.training.files)

    @property
    def latents_names(self) -> str:
        return f"x[0-9][0-9][0-9][0-9]_{self.suffix}.safetensors"

    @property
    def needs(self) -> Sequence[str]:
        if self.encodes:
            return super().needs
        files = (*self.latents.files, *self.text.files)
        return sorted({file.key.partition(".")[0] for file in files if file.required}, reverse=True)

    @property
    def text_counts(self) -> tuple[int, int]:
        files = {file.key: file for file in self.program_files if file.key.startswith("text")}
        return sum(file.required for file in files.values()), len(files)

    def encoder_files(self, kind: str) -> tuple[File, ...]:
        return self.caching(kind).files

    def takes_dtype(self, kind: str, text_dtype: str | None) -> bool:
        if self.encodes:
            return kind == "latents" or text_dtype == "bfloat16"
        return self.caching(kind).dtype_flag is not None


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


class Strategies(Architecture, frozen=True):
    """An architecture as sd-scripts supports it."""

    title: str
    latents_ending: str
    training_scripts: tuple[str, ...]  # without endings, the default first
    network: str
    marks: tuple[str, ...]  # parts of tensor names; a file of the network has one of them
    text_ending: str | None = None  # None: captions are encoded during the training
    # Array in embeddings that Latentmake makes -> tensor, and the text encoders whose tensors are
    # joined. `places` stands for zeros for each token, `applied` for the model's key of this name.
    text_arrays: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    files: tuple[File, ...] = ()  # files of the training script besides the network
    folders: tuple[str, ...] = ()  # flags of `files` that also take a folder
    switches: tuple[str, ...] = ()  # further flags of the training scripts
    complete: tuple[str, ...] = ()  # scripts that train the complete network
    unregularised: tuple[str, ...] = ()  # scripts that refuse regularisation images
    unweighted: tuple[str, ...] = ()  # scripts that ignore `prior_loss_weight`
    batches_text: bool = False  # whether the scripts take `--text_encoder_batch_size`
    divisor: int = 0  # divisor of bucket steps in the default script; 0: `bucket_divisor`
    latents: Encoder | None = None  # None: Latentmake encodes
    text: Encoder | None = None  # None: Latentmake encodes, or there are no text caches
    samples: bool = False  # whether latents are a sample of the posterior
    # Variant of the weights in a folder that is read with a `mixed_precision` of the same name.
    variant: str | None = None

    @property
    def pattern(self) -> str:
        return "|".join(map(re.escape, self.marks))

    @property
    def encoders(self) -> tuple[str, ...]:
        return super().encoders if self.encodes else ("sdscripts",)

    @property
    def defaults(self) -> Mapping[str, str]:
        if self.encodes:
            return {}
        posterior = "sample" if self.samples else "mean"
        own = {"layout": "sdscripts", "encoder": "sdscripts"}
        return {**own, "dtype": "bfloat16", "posterior": posterior}

    @property
    def fixes_dtype(self) -> bool:
        return any(encoder and encoder.fixed for encoder in (self.latents, self.text))

    @property
    def program_files(self) -> tuple[File, ...]:
        return self.files

    @property
    def latents_names(self) -> str:
        return self.latents_ending

    @property
    def text_counts(self) -> tuple[int, int] | None:
        number = sum(file.key.startswith("text") for file in self.files)
        return None if self.encodes else (number, number)

    def takes_dtype(self, kind: str, text_dtype: str | None) -> bool:
        encoder = self.encoder(kind)
        return not (encoder and encoder.fixed)

    def recommended(self, script: str) -> Mapping[str, Setting]:
        """Return the settings that the guide of a script recommends."""
        return _COMPLETE if script in self.complete else self.settings

    def encoder(self, kind: str) -> Encoder | None:
        return self.text if kind == "text" else self.latents
