"""Files of a model on disk: where its parts lie, and their weights, configuration and tokenizer.

Folders are read as diffusers and transformers read them. A file that is missing, damaged or of
another form is a ModelError. Nothing here loads a network or reaches the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.weights import TextWeights, Weights, download, fetching
from latentmake.errors import ConfigError, ModelError
from latentmake.models import headers
from latentmake.regular import read_text

if TYPE_CHECKING:
    from latentmake.config.architectures import Script
    from latentmake.models.checkpoints import Checkpoint

_Place = TypeVar("_Place", bound=Weights)
_CONFIGS = ("config.json", "scheduler_config.json")  # of a folder that is a part itself
PARTS = {
    "vae": ("vae",),
    "unet": ("unet",),
    "scheduler": ("scheduler",),
    "clip": ("image_encoder",),
    "image_encoder": ("image_encoder",),
    # Wan 2.2's pipelines have the network for high noise in `transformer`, that for low noise in
    # `transformer_2`; its original release has folders of these other names.
    "dit": ("transformer_2", "transformer", "low_noise_model"),
    "dit_high_noise": ("transformer", "high_noise_model"),
}
"""Key of a model -> names of the part's folder in a pipeline, in order."""
_ORIGINAL_SUFFIXES = (".safetensors", ".pth", ".pt")
STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Names of the files of weights in a folder, without variant and suffix."""
_VARIANT = re.compile(
    rf"(?:{'|'.join(STEMS)})(?:(\.(?!.*-of-)[\w-]+)\.(?:safetensors|bin)"
    r"|\.(?:safetensors|bin)\.index(\.[\w-]+)\.json)"
)
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
_COPY = "copy the model again"
_ADDED_BYTES = 1_000_000  # of a tokenizer.json, in which its added tokens are
T5_LENGTH = 512
"""Tokens kept of a caption for T5, as SD3, Flux and Wan do."""
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
    """Return a configuration whose models name the files and folders of their parts.

    A model may name the folder of a pipeline for each part, or a repository on the hub. A place
    where nothing lies is left as it is written, so that its reader names it.

    Raises:
        ConfigError: one place for several text encoders is no pipeline.
    """
    models = {}
    for name, model in config.models.items():
        found: dict[str, Any] = {}
        for key, names in PARTS.items():
            value = getattr(model, key)
            if isinstance(value, Weights) and (value.path or value.hub):
                found[key] = _placed(model, value, names)
            elif isinstance(value, str):
                found[key] = folder_in(value, names)
        encoders, places = model.spec.text_encoders, model.text
        pipeline = len(places) == 1 < len(encoders) and (
            places[0].hub is not None or Path(places[0].local, "text_encoder_2").is_dir()
        )
        found["text"] = texts = []
        for number, place in enumerate(places * len(encoders) if pipeline else places):
            # Without an architecture, a pipeline named again stands for its next encoder.
            at = number if encoders else [x.local for x in places[:number]].count(place.local)
            folder = f"text_encoder_{at + 1}" if at else "text_encoder"
            if pipeline and place.hub is not None:
                place = place.model_copy(update={"subfolder": folder})
            texts.append(_placed(model, place, (folder,)))
        if len(texts) < len(encoders):
            what = f"{texts[0].local} is no pipeline's folder, and {model.architecture} has"
            what = f"{what} {len(encoders)} text encoders: {', '.join(encoders)}"
            raise ConfigError(what, where=f"models.{name}.text", hint="name each of them in a list")
        changes = {key: value for key, value in found.items() if value != getattr(model, key)}
        models[name] = model.model_copy(update=changes) if changes else model
    return config.model_copy(update={"models": models})


def folder_in(path: str, names: tuple[str, ...]) -> str:
    """Return the folder of a part in a pipeline's; a path that is no pipeline's as it is."""
    if any(Path(path, name).is_file() for name in _CONFIGS):
        return path
    return next((str(Path(path, name)) for name in names if Path(path, name).is_dir()), path)


def _placed(model: Model, weights: _Place, names: tuple[str, ...]) -> _Place:
    """Return weights with the path of their part.

    Weights on the hub that an encoder of ours loads by itself stay there: its caches are known by
    the commit.
    """
    if weights.hub is not None and weights.file is None:
        if model.spec.encodes and not model.scripted:
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
    """Return the complete checkpoint whose part weights name; None for any other weights."""
    if headers.part_of(weights) is None:
        return None
    from latentmake.models.checkpoints import Checkpoint  # most models are folders

    return Checkpoint(weights)


def weights_files(weights: Weights, *, original: bool = False) -> list[Path]:
    """Return the files that hold a local network: its configuration, then its weights.

    Of a folder safetensors come before .bin, and an index file before its shards; a variant such as
    fp16 counts where nothing else is there. A single file has its configuration beside it or where
    `config` says.

    With `original` a single file may be Wan's original release (.pth, .pt, .safetensors). It needs
    no configuration, so one counts only where `config` names it.
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
    """Return a folder's files of weights of a variant, or of none (""), if it has them."""
    for suffix in ("safetensors", "bin"):
        for stem in STEMS:
            if (single := folder / f"{stem}{variant}.{suffix}").is_file():
                return [single]
            if (index := folder / f"{stem}.{suffix}.index{variant}.json").is_file():
                return [index, *_shards(index)]
    return []


def only_variant(folder: Path) -> str:
    """Return the variant that is all that a folder holds, such as `fp16`; "" for other folders."""
    found = variants(folder)
    return found[0].removeprefix(".") if found and not _of_variant(folder, "") else ""


def variants(folder: Path) -> list[str]:
    """Return the variants of weights in a folder, such as `.fp16`, the most usual first.

    diffusers and transformers name them `model.fp16.safetensors`, and in shards
    `model.fp16-00001-of-00002.safetensors` with `model.safetensors.index.fp16.json`.
    """
    matches = (_VARIANT.fullmatch(each.name) for each in folder.glob("*"))
    found = {match[1] or match[2] for match in matches if match}
    return sorted(found, key=lambda each: (each != ".fp16", each != ".bf16", each))


def refuse_missing(path: Path) -> None:
    """Refuse a model path that leads to no file or folder; it may be meant as a hub id."""
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


def script_of(model: Model, kind: str) -> Script:
    """Return the script that caches `latents` or `text` of a model of musubi-tuner."""
    assert model.spec.scripts is not None
    return model.spec.scripts.caching(kind)


def scripted_files(path: Path) -> list[Path]:
    """Return the files that a script reads of a local file or folder of weights.

    A file that is one shard of several stands for all of them.
    """
    refuse_missing(path)
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file())
        if not found:
            raise ModelError("this model folder is empty", where=path, hint=_COPY)
        return found
    if (shard := _SHARD.fullmatch(path.name)) is None:
        return [path]
    numbers = range(1, int(shard[2]) + 1)
    return _present(
        [path.with_name(f"{shard[1]}-{x:05d}-of-{shard[2]}{shard[3]}") for x in numbers]
    )


def projection_file(path: str) -> Path:
    """Return the file of weights of a text projection.

    The path is its own, its folder's, or a pipeline's with one sub-folder `..._projection`.
    """
    place = Path(path)
    refuse_missing(place)
    if place.suffix == ".safetensors":
        return place
    folder = "*projection*/" if (place / "model_index.json").is_file() else ""
    found: list[Path] = []
    for variant in ("", ".*"):
        names = [f"{folder}{stem}{variant}.safetensors" for stem in STEMS]
        found = found or [file for name in names for file in place.glob(name)]
    if len(found) != 1:
        what = f"holds {len(found) or 'no'} projection{'s' if len(found) > 1 else ''}"
        hint = "name the folder or .safetensors file of a linear projection"
        raise ModelError(what, where=place, hint=hint)
    return found[0]


# -- configuration --------------------------------------------------------------------------------


def config_file(weights: Weights) -> Path | None:
    """Return the config.json of a local network, or None for a single file that has none."""
    path = Path(weights.path or "")
    if path.is_dir():
        return path / "config.json"
    if weights.config is None:  # what lies beside a checkpoint is not its own
        beside = path.parent / "config.json"
        return beside if beside.is_file() and not weights.subfolder else None
    named = Path(weights.config)
    named = named / "config.json" if named.is_dir() else named
    if not named.is_file():
        raise ModelError("this configuration does not exist", where=named, hint="correct `config`")
    return named


def network_config(weights: Weights) -> dict[str, Any] | None:
    """Read the configuration of a network; None where none is on this disk."""
    path = None if weights.hub is not None else config_file(weights)
    if path is None:
        whole = checkpoint_of(weights)
        return whole.config() if whole else None
    try:
        found = json.loads(read_text(path))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        what = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ModelError(what, where=path, hint=_COPY) from None
    return found


# -- tokenizers -----------------------------------------------------------------------------------


def tokenizer_files(weights: TextWeights, *, umt5: bool = False) -> list[Path]:
    """Return the files of a local text encoder's tokenizer that affect its output.

    Where `tokenizer` names no folder, it is `tokenizer_2` for `text_encoder_2` and so on, as in
    diffusers pipelines, else the folder of the weights. Single files of umT5 come without one.
    """
    path, named = Path(weights.path or ""), weights.tokenizer
    folder = path.parent if path.suffix in _ORIGINAL_SUFFIXES else path
    hint = "name its folder as `tokenizer` beside the text encoder's `path`"
    if whole := checkpoint_of(weights):
        folder, hint = whole.tokenizer(), whole.tokenizer_hint
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
    """Return a tokenizer's token of padding, and all tokens that it never splits, by its files.

    Only the head of tokenizer.json is read, where its added tokens are.
    """
    padding, found = None, set[str]()
    for file in files:
        try:
            if file.name == "tokenizer.json":
                with file.open(encoding="utf-8") as opened:  # a file: see `tokenizer_files`
                    _, _, head = opened.read(_ADDED_BYTES).partition('"added_tokens":')
                added = json.JSONDecoder().raw_decode(head.lstrip())[0] if head else []
                found |= {each["content"] for each in added}
            elif file.name in ("tokenizer_config.json", "special_tokens_map.json"):
                values = json.loads(read_text(file))
                named = {x: _content(values[x]) for x in values if x.endswith("_token")}
                padding = named.get("pad_token") or padding
                several = [values.get(f"{x}_special_tokens") for x in ("additional", "extra")]
                lists = [each for each in several if isinstance(each, list)]
                added = [*values.get("added_tokens_decoder", {}).values(), *chain(*lists)]
                found |= {*filter(None, named.values()), *map(_content, added)}
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            continue  # the job that loads the tokenizer says what is wrong
    return padding, found


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def vae_factor(weights: Weights) -> int | None:
    """Return the width of one latent in pixels; None where no configuration on this disk says."""
    config = network_config(weights)
    try:  # diffusers' AutoencoderKL halves the size after each block but the last
        return None if config is None else int(2 ** (len(config["block_out_channels"]) - 1))
    except (KeyError, TypeError):
        what, hint = "this is not the configuration of an AutoencoderKL", "name the folder of a VAE"
        raise ModelError(what, where=config_file(weights) or "", hint=hint) from None
