"""Files of a model on disk: paths of its parts, their weights, configuration and tokenizer.

Folders are read as diffusers and transformers read them. A file that is missing, damaged or of
another format raises a ModelError. This module neither loads networks nor connects to the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from latentmake.base.errors import ConfigError, ModelError
from latentmake.base.regular import read_text
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.weights import TextWeights, Weights, download, fetching
from latentmake.formats.safetensors import read_head

if TYPE_CHECKING:
    from latentmake.models.checkpoints import Checkpoint

_Place = TypeVar("_Place", bound=Weights)
_CONFIGS = ("config.json", "scheduler_config.json")  # mark a folder as one part
PARTS = {
    "vae": ("vae",),
    "unet": ("unet",),
    "scheduler": ("scheduler",),
    "clip": ("image_encoder",),
    "image_encoder": ("image_encoder",),
    # Wan 2.2's pipelines keep the network for high noise in `transformer` and the one for low noise
    # in `transformer_2`; the original release has the other folder names.
    "dit": ("transformer_2", "transformer", "low_noise_model"),
    "dit_high_noise": ("transformer", "high_noise_model"),
}
"""Key of a model -> possible names of the part's folder in a pipeline, preferred first."""
_ORIGINAL_SUFFIXES = (".safetensors", ".pth", ".pt")
STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Names of weight files in a folder, without variant and suffix."""
_VARIANT = re.compile(
    rf"(?:{'|'.join(STEMS)})(?:(\.(?!.*-of-)[\w-]+)\.(?:safetensors|bin)"
    r"|\.(?:safetensors|bin)\.index(\.[\w-]+)\.json)"
)
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
_COPY = "copy the model again"
_ADDED_BYTES = 1_000_000  # length of the head of tokenizer.json with its added tokens
T5_LENGTH = 512
"""Number of a caption's tokens that T5 keeps, as in SD3, Flux and Wan."""
_UMT5_TOKENIZER = (
    "umT5's is google/umt5-xxl on the hub: fetch its tokenizer.json, tokenizer_config.json, "
    "special_tokens_map.json and spiece.model and name their folder as `tokenizer`, or, where the "
    "hub can be reached, write as musubi-tuner takes it `tokenizer: {hub: Wan-AI/Wan2.1-T2V-14B, "
    "subfolder: google/umt5-xxl, revision: COMMIT}`"
)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "spiece.model"),
)


# -- places of a model's parts --------------------------------------------------------------------


def resolved(config: Config) -> Config:
    """Return the configuration with the paths of all parts of its models filled in.

    A key of a model may name the folder of a pipeline instead of a part, or a repository on the
    hub. A path that does not exist stays as written: the error of its reader then shows that path.

    Raises:
        ConfigError: there is one path for several text encoders, and it is no pipeline.
    """
    models = {}
    for name, model in config.models.items():
        parts: dict[str, Any] = {}
        for key, names in PARTS.items():
            value = getattr(model, key)
            if isinstance(value, Weights) and (value.path or value.hub):
                parts[key] = _placed(model, value, names)
            elif isinstance(value, str):
                parts[key] = folder_in(value, names)
        encoders, places = model.spec.text_encoders, model.text
        pipeline = len(places) == 1 < len(encoders) and (
            places[0].hub is not None or Path(places[0].local, "text_encoder_2").is_dir()
        )
        parts["text"] = texts = []
        for number, place in enumerate(places * len(encoders) if pipeline else places):
            # Without an architecture, a repeated pipeline path means the next text encoder.
            earlier = [other.local for other in places[:number]]
            at = number if encoders else earlier.count(place.local)
            folder = f"text_encoder_{at + 1}" if at else "text_encoder"
            if pipeline and place.hub is not None:
                place = place.model_copy(update={"subfolder": folder})
            texts.append(_placed(model, place, (folder,)))
        if len(texts) < len(encoders):
            what = f"{texts[0].local} is no pipeline's folder, and {model.architecture} has"
            what = f"{what} {len(encoders)} text encoders: {', '.join(encoders)}"
            raise ConfigError(what, where=f"models.{name}.text", hint="name each of them in a list")
        changes = {key: value for key, value in parts.items() if value != getattr(model, key)}
        models[name] = model.model_copy(update=changes) if changes else model
    return config.model_copy(update={"models": models})


def folder_in(path: str, names: tuple[str, ...]) -> str:
    """Return the folder of a part inside a pipeline; return any other path unchanged."""
    if any(Path(path, name).is_file() for name in _CONFIGS):
        return path
    return next((str(Path(path, name)) for name in names if Path(path, name).is_dir()), path)


def _placed(model: Model, weights: _Place, names: tuple[str, ...]) -> _Place:
    """Return weights with the path of their part filled in.

    Weights on the hub that Latentmake's own encoders load keep their hub id: the commit identifies
    them in the recipe.
    """
    if weights.hub is not None and weights.file is None:
        if not model.is_external:
            return weights
    elif weights.hub is None and weights.subfolder and not Path(weights.path or "").is_dir():
        return weights  # a part of a complete checkpoint
    path = folder_in(weights.local, names)
    if path == weights.path and weights.hub is None:
        return weights
    gone = dict.fromkeys(("hub", "revision", "subfolder", "file"))
    return weights.model_copy(update={**gone, "path": path})


# -- weights --------------------------------------------------------------------------------------


def checkpoint_of(weights: Weights) -> Checkpoint | None:
    """Return the complete checkpoint from which weights select a part; None for other weights."""
    if weights.path is None or not weights.subfolder or not Path(weights.path).is_file():
        return None
    from latentmake.models.checkpoints import Checkpoint  # rarely needed: most models are folders

    return Checkpoint(weights)


def weights_files(weights: Weights, *, original: bool = False) -> list[Path]:
    """Return the files of a local network: its configuration, then its weights.

    In a folder, safetensors files are preferred to .bin files, and an index file comes before its
    shards. A variant such as fp16 is used only if there are no other weights. The configuration of
    a single file lies beside it or at the path in `config`.

    With `original`, a single file may be Wan's original release (.pth, .pt, .safetensors). It needs
    no configuration, so a configuration is included only if `config` names one.

    Raises:
        ModelError: a file is missing or of another format.
    """
    path = Path(weights.path or "")
    if path.is_file():
        suffixes = _ORIGINAL_SUFFIXES if original else _ORIGINAL_SUFFIXES[:1]
        if path.suffix not in suffixes:
            what, hint = f"is not a {' or '.join(suffixes)} file", "convert it to safetensors"
            raise ModelError(what, where=path, hint=f"name a diffusers folder or {hint}")
        config = None if original and weights.config is None else config_file(weights)
        return [path] if config is None else [config, path]
    config = path / "config.json"
    if not config.is_file():
        refuse_missing(path)
        hint = "name the complete folder of one network, such as .../vae"
        raise ModelError("this model folder has no config.json", where=path, hint=hint)
    for variant in ("", *variants(path)):
        if files := _of_variant(path, variant):
            return [config, *files]
    hint = f"it should hold {STEMS[0]}.safetensors or {STEMS[1]}.safetensors; copy it again"
    raise ModelError("this model folder holds no weights", where=path, hint=hint)


def _of_variant(folder: Path, variant: str) -> list[Path]:
    """Return a folder's weight files of one variant; "" stands for weights without a variant."""
    for suffix in ("safetensors", "bin"):
        for stem in STEMS:
            if (single := folder / f"{stem}{variant}.{suffix}").is_file():
                return [single]
            if (index := folder / f"{stem}.{suffix}.index{variant}.json").is_file():
                return [index, *_shards(index)]
    return []


def only_variant(folder: Path) -> str:
    """Return the first variant (`fp16`) of a folder that has no plain weights; "" for others."""
    names = variants(folder)
    return names[0].removeprefix(".") if names and not _of_variant(folder, "") else ""


def variants(folder: Path) -> list[str]:
    """Return the variants of weights in a folder, such as `.fp16`, most common first.

    diffusers and transformers name a file `model.fp16.safetensors`, and shards
    `model.fp16-00001-of-00002.safetensors` with `model.safetensors.index.fp16.json`.
    """
    matches = (_VARIANT.fullmatch(file.name) for file in folder.glob("*"))
    names = {match[1] or match[2] for match in matches if match}
    return sorted(names, key=lambda name: (name != ".fp16", name != ".bf16", name))


def refuse_missing(path: Path) -> None:
    """Raise a ModelError if a path does not exist; its hint also covers a hub id as path."""
    if path.is_dir() or path.is_file():
        return
    if path.exists():
        raise ModelError("is neither a file nor a folder", where=path, hint="correct its path")
    what, hint = "this model does not exist", "correct its path"
    if command := download(path):
        what, hint = "this model is not in the local hub cache", f"run `{command}`"
    elif fetched := fetching(path):
        what += f": {fetched}"
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        hint += f", or write {{hub: {path}, revision: ...}} (40 hex digits)"
    raise ModelError(what, where=path, hint=hint)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError("is not an index of weights", where=index, hint="copy it again") from None
    return _present([index.parent / Path(str(name)).name for name in names])


def _present(shards: list[Path]) -> list[Path]:
    for shard in shards:
        if not shard.is_file():
            raise ModelError("these weights are missing", where=shard, hint=_COPY)
    return shards


def scripted_files(path: Path) -> list[Path]:
    """Return the files that a script reads, given a local file or folder of weights.

    The path of one shard stands for all shards.

    Raises:
        ModelError: a file is missing, or the folder is empty.
    """
    refuse_missing(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            raise ModelError("this model folder is empty", where=path, hint=_COPY)
        return files
    if (shard := _SHARD.fullmatch(path.name)) is None:
        return [path]
    numbers = range(1, int(shard[2]) + 1)
    names = (f"{shard[1]}-{number:05d}-of-{shard[2]}{shard[3]}" for number in numbers)
    return _present([*map(path.with_name, names)])


def projection_file(path: str) -> Path:
    """Return the weight file of a text projection; raises ModelError.

    The path may name the file, its folder, or a pipeline with one sub-folder `..._projection`.
    """
    place = Path(path)
    refuse_missing(place)
    if place.suffix == ".safetensors":
        return place
    folder = "*projection*/" if (place / "model_index.json").is_file() else ""
    files: list[Path] = []
    for variant in ("", ".*"):
        names = [f"{folder}{stem}{variant}.safetensors" for stem in STEMS]
        files = files or [file for name in names for file in place.glob(name)]
    if len(files) != 1:
        what = f"holds {len(files) or 'no'} projection{'s' if len(files) > 1 else ''}"
        hint = "name the folder or .safetensors file of a linear projection"
        raise ModelError(what, where=place, hint=hint)
    return files[0]


# -- configuration --------------------------------------------------------------------------------


def config_file(weights: Weights) -> Path | None:
    """Return the config.json of a local network; None for a single file without one."""
    path = Path(weights.path or "")
    if path.is_dir():
        return path / "config.json"
    if weights.config is None:
        # A config.json beside a complete checkpoint (`subfolder`) does not describe its part.
        beside = path.parent / "config.json"
        return beside if beside.is_file() and not weights.subfolder else None
    named = Path(weights.config)
    named = named / "config.json" if named.is_dir() else named
    if not named.is_file():
        raise ModelError("this configuration does not exist", where=named, hint="correct `config`")
    return named


def network_config(weights: Weights) -> dict[str, Any] | None:
    """Read the configuration of a network; None if it is not on this disk; raises ModelError."""
    path = None if weights.hub is not None else config_file(weights)
    if path is None:
        checkpoint = checkpoint_of(weights)
        return checkpoint.config() if checkpoint else None
    try:
        config = json.loads(read_text(path))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        what = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ModelError(what, where=path, hint=_COPY) from None
    return config


def text_width(weights: TextWeights) -> int | None:
    """Return the width of an encoder's embeddings; None if no file says it; raises ModelError."""
    if weights.projection is None:
        if (config := text_config(weights)) is None:
            return None
        return int(config.get("hidden_size") or config.get("d_model") or 512)
    if weights.trust_remote_code:  # custom code may return any width
        return None
    return projection_shape(weights.projection)[0]


def projection_shape(path: str) -> tuple[int, int]:
    """Return the output width and the input width of a text projection; raises ModelError."""
    file = projection_file(path)
    try:
        tensors = read_head(file).tensors.values()
        ((gives, takes),) = (tensor.shape for tensor in tensors if len(tensor.shape) == 2)
    except (OSError, ValueError):
        what, hint = "is no linear projection", "name the file of a linear layer"
        raise ModelError(what, where=file, hint=hint) from None
    return gives, takes


def text_tokens(weights: TextWeights) -> tuple[int, bool] | None:
    """Return the largest number of tokens in an encoder's embeddings; None if no file says it.

    The second value says whether all embeddings have this number of tokens (CLIP), or as many as
    their captions (T5).

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = text_config(weights)
    if config is None:
        return None
    if not str(config.get("model_type", "")).startswith("clip"):
        return weights.max_length or T5_LENGTH, False
    limit = config.get("max_position_embeddings") or 77
    return min(weights.max_length or limit, limit), True


def text_config(weights: TextWeights) -> dict[str, Any] | None:
    """Return the configuration of a text encoder; for a complete CLIP, of its text half."""
    config = network_config(weights)
    return None if config is None else {**config, **(config.get("text_config") or {})}


# -- tokenizers -----------------------------------------------------------------------------------


def tokenizer_files(weights: TextWeights, *, umt5: bool = False) -> list[Path]:
    """Return the files of a local text encoder's tokenizer that affect its output.

    Without a folder in the key `tokenizer`, `text_encoder_2` has its tokenizer in `tokenizer_2` and
    so on, as in diffusers pipelines; otherwise it lies beside the weights.

    Args:
        weights: text encoder.
        umt5: whether the hint of an error explains how to get umT5's tokenizer, which single files
            of umT5 lack.

    Raises:
        ModelError: there is no tokenizer.
    """
    path, named = Path(weights.path or ""), weights.tokenizer
    folder = path.parent if path.suffix in _ORIGINAL_SUFFIXES else path
    hint = "name its folder as `tokenizer` beside the text encoder's `path`"
    if checkpoint := checkpoint_of(weights):
        folder, hint = checkpoint.tokenizer(), checkpoint.tokenizer_hint
    elif folder.name.startswith("text_encoder"):
        sibling = folder.with_name(folder.name.replace("text_encoder", "tokenizer", 1))
        own = any((folder / name).is_file() for name in _TOKENIZER_FILES)
        folder = sibling if sibling.is_dir() or not own else folder
    if named is not None and named.path is not None:
        folder = Path(named.path)
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        refuse_missing(path)
        hint = _UMT5_TOKENIZER if umt5 else hint
        raise ModelError("there is no tokenizer here", where=folder, hint=hint)
    return files


def special_tokens(files: Iterable[Path]) -> tuple[str | None, set[str]]:
    """Read a tokenizer's padding token, and all special tokens, which it never splits.

    Only the head of tokenizer.json is read: it contains the added tokens, and the file is large.
    """
    padding, special = None, set[str]()
    for file in files:
        try:
            if file.name == "tokenizer.json":
                with file.open(encoding="utf-8") as opened:  # a regular file, see `tokenizer_files`
                    _, _, head = opened.read(_ADDED_BYTES).partition('"added_tokens":')
                added = json.JSONDecoder().raw_decode(head.lstrip())[0] if head else []
                special |= {token["content"] for token in added}
            elif file.name in ("tokenizer_config.json", "special_tokens_map.json"):
                values = json.loads(read_text(file))
                named = {key: _content(values[key]) for key in values if key.endswith("_token")}
                padding = named.get("pad_token") or padding
                keys = [f"{word}_special_tokens" for word in ("additional", "extra")]
                lists = [values[key] for key in keys if isinstance(values.get(key), list)]
                added = [*values.get("added_tokens_decoder", {}).values(), *chain(*lists)]
                special |= {*filter(None, named.values()), *map(_content, added)}
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            continue  # the job that loads the tokenizer reports the error
    return padding, special


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def vae_factor(weights: Weights) -> int | None:
    """Return the width of one latent in pixels; None if no configuration on this disk says it."""
    config = network_config(weights)
    try:  # diffusers' AutoencoderKL halves the size after each block but the last
        return None if config is None else int(2 ** (len(config["block_out_channels"]) - 1))
    except (KeyError, TypeError):
        what, hint = "this is not the configuration of an AutoencoderKL", "name the folder of a VAE"
        raise ModelError(what, where=config_file(weights) or "", hint=hint) from None
