"""Files of a model on disk: weights, configuration, tokenizer.

Folders are read as diffusers and transformers read them. Nothing here loads a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.models import checkpoints
from latentmake.regular import read_regular

_ORIGINAL_SUFFIXES = (".safetensors", ".pth", ".pt")
_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_UMT5_TOKENIZER = (
    "umT5's is google/umt5-xxl on the hub: fetch its tokenizer.json, tokenizer_config.json, "
    "special_tokens_map.json and spiece.model and name their folder as `tokenizer`, or, where the "
    "hub can be reached, write as musubi-tuner takes it `tokenizer: {hub: Wan-AI/Wan2.1-T2V-14B, "
    "subfolder: google/umt5-xxl, revision: COMMIT}`"
)
_SIZES = ("latent_channels", "hidden_size", "d_model", "max_position_embeddings")
_FACTORS = ("scaling_factor", "shift_factor")
_LARGEST = 10**9
_MOST_LAYERS = 256  # each is built before its weights are compared with those of the files
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "spiece.model"),
)


def weights_files(weights: Weights) -> list[Path]:
    """Return the files that hold a local network: its configuration, then its weights.

    Of a folder safetensors come before .bin, and an index file before its shards. A single file has
    its configuration beside it or where `config` says.

    Raises:
        ModelError: something is missing.
    """
    path = Path(weights.path or "")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(
                "is not a .safetensors file",
                where=path,
                hint="name a diffusers folder or convert it to safetensors",
            )
        config = config_file(weights)
        return [path] if config is None else [config, path]
    refuse_missing(weights)
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(
            "this model folder has no config.json",
            where=path,
            hint="name the complete folder of one network, such as .../vae",
        )
    for suffix in ("safetensors", "bin"):
        for stem in _STEMS:
            if (single := path / f"{stem}.{suffix}").is_file():
                return [config, single]
            if (index := path / f"{stem}.{suffix}.index.json").is_file():
                return [config, index, *_shards(index)]
    raise ModelError(
        "this model folder holds no weights",
        where=path,
        hint=f"it should hold {_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors; copy it again",
    )


def encoder_files(model: Model, weights: Weights) -> list[Path]:
    """Return the files of one of a model's local encoders.

    A single file of Wan's original release (.pth, .pt, .safetensors) needs no configuration, since
    the shapes of its weights determine it: one counts only where `config` names it.

    Raises:
        ModelError: something is missing.
    """
    path = Path(weights.path or "")
    if not model.spec.original_files or not path.is_file():
        return weights_files(weights)
    if path.suffix not in _ORIGINAL_SUFFIXES:
        raise ModelError(
            f"is none of {', '.join(_ORIGINAL_SUFFIXES)}",
            where=path,
            hint="name the file of weights",
        )
    config = None if weights.config is None else config_file(weights)
    return [path] if config is None else [config, path]


def refuse_missing(weights: Weights) -> None:
    """Refuse a model path that does not exist; it may be meant as a hub id.

    Raises:
        ModelError: nothing lies there.
    """
    path = Path(weights.path or "")
    if weights.path is None or path.exists():
        return
    from latentmake.config import hub

    if command := hub.download(path):
        what, hint = "this model is not in the local hub cache", f"run `{command}`"
        raise ModelError(what, where=path, hint=hint)
    hint = "correct its path"
    if not path.is_absolute() and len(path.parts) == 2 and not Path(path.parts[0]).exists():
        hint += f", or name a model of the hub as {{hub: {path}, revision: ...}}, with its commit"
        hint += " (40 hex digits)"
    raise ModelError("this model does not exist", where=path, hint=hint)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelError("is not an index of weights", where=index, hint="copy it again") from None
    shards = [index.parent / Path(str(name)).name for name in names]
    for shard in shards:
        if not shard.is_file():
            raise ModelError("these weights are missing", where=shard, hint="copy the model again")
    return shards


def config_file(weights: Weights) -> Path | None:
    """Return the config.json of a local network, or None for a single file that has none.

    Raises:
        ModelError: `config` names something that is not there.
    """
    path = Path(weights.path or "")
    if path.is_dir():
        return path / "config.json"
    if weights.config is None and weights.subfolder:
        return None  # what lies beside a checkpoint is not its own
    if weights.config is None:
        beside = path.parent / "config.json"
        return beside if beside.is_file() else None
    named = Path(weights.config)
    named = named / "config.json" if named.is_dir() else named
    if not named.is_file():
        raise ModelError("this configuration does not exist", where=named, hint="correct `config`")
    return named


def network_config(weights: Weights) -> dict[str, Any] | None:
    """Read the configuration of a network; None where none is on this disk.

    Raises:
        ModelError: it cannot be read, or says what no network can have.
    """
    path = None if weights.hub is not None else config_file(weights)
    if path is None:
        return checkpoints.config_of(weights) if checkpoints.part_of(weights) else None
    try:
        found = json.loads(read_regular(path))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        _refuse_odd(found)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot be read ({error})", where=path, hint="copy the model again"
        ) from None
    return found


def _refuse_odd(config: Mapping[str, Any]) -> None:
    """Refuse, by ValueError, a configuration with values that no network can have."""
    for key, value in config.items():
        if _is_odd(key, value):
            raise ValueError(f"no network has `{key}: {json.dumps(value):.80}`")
        if isinstance(value, dict):
            _refuse_odd(value)


def _is_odd(key: str, value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    if value is None:
        return False
    if key in _SIZES:
        return type(value) is not int or not 0 < value < _LARGEST
    if key in _FACTORS:  # NaN is not less than anything
        number = type(value) in (int, float) and abs(value) < _LARGEST
        return not number or (key == "scaling_factor" and value == 0)
    if key == "block_out_channels":
        return not isinstance(value, list) or len(value) > _MOST_LAYERS
    if "layers" in key:
        return any(type(each) is int and each > _MOST_LAYERS for each in several)
    return key == "text_config" and not isinstance(value, dict)


def projection_file(path: str) -> Path:
    """Return the file of weights of a text projection.

    Args:
        path: that file, its folder, or a pipeline's folder with one sub-folder `..._projection`.

    Raises:
        ModelError: there is none.
    """
    hint = "name the folder or .safetensors file of a linear projection"
    place = Path(path)
    if place.is_file():
        if place.suffix != ".safetensors":
            raise ModelError("is not a .safetensors file", where=place, hint=hint)
        return place
    if not place.is_dir():
        raise ModelError("this projection does not exist", where=place, hint="correct its path")
    folders = [place]
    if (place / "model_index.json").is_file():
        folders = sorted(each for each in place.glob("*projection*") if each.is_dir())
    files = [folder / f"{stem}.safetensors" for folder in folders for stem in _STEMS]
    found = [file for file in files if file.is_file()]
    if len(found) != 1:
        raise ModelError(
            f"holds {len(found) or 'no'} projection{'s' if len(found) > 1 else ''}",
            where=place,
            hint=hint,
        )
    return found[0]


def tokenizer_folder(weights: TextWeights) -> Path:
    """Return the folder of a local text encoder's tokenizer.

    Where the configuration names none: `tokenizer_2` for `text_encoder_2` and so on, as diffusers
    pipelines have it, else the folder of the weights.
    """
    if weights.tokenizer is not None and weights.tokenizer.path is not None:
        return Path(weights.tokenizer.path)
    if checkpoints.part_of(weights):
        return checkpoints.tokenizer_of(weights)
    path = Path(weights.path or "")
    folder = path.parent if path.suffix in _ORIGINAL_SUFFIXES else path
    if folder.name.startswith("text_encoder"):
        sibling = folder.with_name(folder.name.replace("text_encoder", "tokenizer", 1))
        if sibling.is_dir() or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return sibling
    return folder


def tokenizer_files(weights: TextWeights, *, umt5: bool = False) -> list[Path]:
    """Return the files of a local tokenizer that affect its output.

    Args:
        weights: of the text encoder.
        umt5: whether it is umT5, whose single files come without a tokenizer.

    Raises:
        ModelError: there are none.
    """
    refuse_missing(weights)
    folder = tokenizer_folder(weights)
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        usual = "name its folder as `tokenizer` beside the text encoder's `path`"
        if checkpoints.part_of(weights):
            usual = checkpoints.TOKENIZER_HINT
        raise ModelError(
            "there is no tokenizer here", where=folder, hint=_UMT5_TOKENIZER if umt5 else usual
        )
    return files
