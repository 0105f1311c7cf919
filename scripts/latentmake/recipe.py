"""Recipes: all that shapes a target's bytes besides its source, as plain values with a digest.

Weights enter by the digest of their files, never by their path: a moved model rebuilds nothing, a
changed one rebuilds what it shapes. Nothing here loads a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from latentmake import digest
from latentmake.config import Dataset, Model, TextWeights, Weights
from latentmake.errors import ModelError

__all__ = [
    "FORMAT_VERSION",
    "NEW",
    "ORIGINAL_SUFFIXES",
    "config_file",
    "latents_recipe",
    "make",
    "original_files",
    "projection_digest",
    "projection_file",
    "text_recipe",
    "tokenizer_files",
    "tokenizer_folder",
    "training_digest",
    "vae_factor",
    "weights_digest",
    "weights_files",
]

FORMAT_VERSION = 1
"""Raised when the same source and settings would give other bytes; every cache is then stale."""

NEW = "new"
"""In the place of a projection's path: it begins with random weights."""

ORIGINAL_SUFFIXES = (".safetensors", ".pth", ".pt")

FileDigest = Callable[[Path], str]

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)


def weights_files(weights: Weights) -> list[Path]:
    """Return the files that hold a local network: its configuration, then its weights.

    A folder is read as diffusers and transformers read it: safetensors before .bin, an index file
    before its shards. A single file has its configuration beside it or where `config` says.

    Raises:
        ModelError: something is missing.
    """
    path = Path(weights.path or "")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(
                "is not a .safetensors file",
                where=path,
                mend="name a diffusers folder or convert it to safetensors",
            )
        config = config_file(weights)
        return [path] if config is None else [config, path]
    if not path.is_dir():
        raise ModelError("this model does not exist", where=path, mend="correct its path")
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(
            "this model folder has no config.json",
            where=path,
            mend="name the folder of one network, such as .../vae, and see that it is complete",
        )
    for stem in _STEMS:
        if (single := path / f"{stem}.safetensors").is_file():
            return [config, single]
        if (index := path / f"{stem}.safetensors.index.json").is_file():
            return [config, index, *_shards(index)]
    for stem in _STEMS:
        if (single := path / f"{stem}.bin").is_file():
            return [config, single]
        if (index := path / f"{stem}.bin.index.json").is_file():
            return [config, index, *_shards(index)]
    raise ModelError(
        "this model folder holds no weights",
        where=path,
        mend=f"it should hold {_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors; copy it again",
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError("is not an index of weights", where=index, mend="copy it again") from None
    shards = [index.parent / Path(str(name)).name for name in names]
    for shard in shards:
        if not shard.is_file():
            raise ModelError("these weights are missing", where=shard, mend="copy the model again")
    return shards


def config_file(weights: Weights) -> Path | None:
    """Return the config.json of a local network, or None for a single file that has none.

    Raises:
        ModelError: `config` names something that is not there.
    """
    path = Path(weights.path or "")
    if path.is_dir():
        return path / "config.json"
    if weights.config is None:
        beside = path.parent / "config.json"
        return beside if beside.is_file() else None
    named = Path(weights.config)
    named = named / "config.json" if named.is_dir() else named
    if not named.is_file():
        raise ModelError("this configuration does not exist", where=named, mend="correct `config`")
    return named


def original_files(weights: Weights) -> list[Path]:
    """Return the files of a local Wan network: a folder's as above, or the one original file.

    Such a file (.pth, .pt, .safetensors) needs no configuration, for its shapes say all: none is
    looked for beside it, but one that `config` names counts.

    Raises:
        ModelError: something is missing.
    """
    path = Path(weights.path or "")
    if not path.is_file():
        return weights_files(weights)
    if path.suffix not in ORIGINAL_SUFFIXES:
        raise ModelError(
            f"is none of {', '.join(ORIGINAL_SUFFIXES)}",
            where=path,
            mend="name the file of weights",
        )
    config = None if weights.config is None else config_file(weights)
    return [path] if config is None else [config, path]


def weights_digest(
    weights: Weights,
    file_digest: FileDigest = digest.of_file,
    files: Callable[[Weights], list[Path]] = weights_files,
) -> str:
    """Return the digest of a network: its files' content, or a hub id at its revision.

    Args:
        weights: where it lies.
        file_digest: how a file's digest is found; the planner passes its memo's.
        files: finds its files.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    if weights.hub is not None:
        return digest.of_value(["hub", weights.hub, weights.revision, weights.subfolder])
    return _files_digest(files(weights), file_digest)


def _files_digest(files: list[Path], file_digest: FileDigest) -> str:
    try:
        return digest.of_value([file_digest(file) for file in files])
    except OSError as error:
        raise ModelError(
            f"cannot be read ({error.strerror})", where=str(error.filename), mend="see its rights"
        ) from None


def projection_file(path: str) -> Path:
    """Return the file of weights of a text projection.

    Args:
        path: that file, its folder, or a pipeline's folder with one sub-folder `..._projection`.

    Raises:
        ModelError: there is none.
    """
    mend = "name the folder or .safetensors file of a linear projection"
    place = Path(path)
    if place.is_file():
        if place.suffix != ".safetensors":
            raise ModelError("is not a .safetensors file", where=place, mend=mend)
        return place
    if not place.is_dir():
        raise ModelError("this projection does not exist", where=place, mend="correct its path")
    folders = [place]
    if (place / "model_index.json").is_file():
        folders = sorted(each for each in place.glob("*projection*") if each.is_dir())
    found = [
        file
        for folder in folders
        for stem in _STEMS
        if (file := folder / f"{stem}.safetensors").is_file()
    ]
    if len(found) != 1:
        raise ModelError(
            f"holds {len(found) or 'no'} projection{'s' if len(found) > 1 else ''}",
            where=place,
            mend=mend,
        )
    return found[0]


def projection_digest(
    path: str, file_digest: FileDigest = digest.of_file, *, with_code: bool = False
) -> str:
    """Return the digest of a text projection.

    Args:
        path: where it lies.
        file_digest: how a file's digest is found.
        with_code: it is made by Python files of the pipeline's own, which count too.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    files = [projection_file(path)]
    if with_code:
        beside = [file for file in files[0].parent.iterdir() if file.suffix in (".py", ".json")]
        files += sorted([*beside, *Path(path).glob("*.py")])
    return _files_digest(files, file_digest)


def training_digest(
    unet: Weights,
    scheduler: str,
    file_digest: FileDigest = digest.of_file,
    *,
    text_projection: str | None = None,
) -> str:
    """Return the digest of what a training starts from: the network and its noise schedule.

    Args:
        unet: where the network lies.
        scheduler: folder of the noise schedule.
        file_digest: how a file's digest is found; the planner passes its memo's.
        text_projection: None, `new`, or where a projection lies.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    schedule = Path(scheduler) / "scheduler_config.json"
    if not schedule.is_file():
        raise ModelError(
            "this noise schedule does not exist",
            where=schedule,
            mend="name the folder of a diffusers scheduler as the model's `scheduler`",
        )
    parts = [weights_digest(unet, file_digest), _files_digest([schedule], file_digest)]
    if text_projection is not None:
        new = text_projection == NEW
        parts.append(NEW if new else projection_digest(text_projection, file_digest))
    return digest.of_value(parts)


def tokenizer_folder(weights: TextWeights) -> Path:
    """Return the folder of a local text encoder's tokenizer.

    Where the configuration names none: `tokenizer_2` for `text_encoder_2` and so on, as diffusers
    pipelines have it, else the folder of the weights.
    """
    if weights.tokenizer is not None:
        return Path(weights.tokenizer)
    path = Path(weights.path or "")
    folder = path.parent if path.suffix in ORIGINAL_SUFFIXES else path
    if folder.name.startswith("text_encoder"):
        sibling = folder.with_name(folder.name.replace("text_encoder", "tokenizer", 1))
        if sibling.is_dir() or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return sibling
    return folder


def tokenizer_files(weights: TextWeights) -> list[Path]:
    """Return the files that shape what a local tokenizer does.

    Raises:
        ModelError: there are none.
    """
    folder = tokenizer_folder(weights)
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise ModelError(
            "there is no tokenizer here",
            where=folder,
            mend="name its folder as `tokenizer` beside the text encoder's `path`",
        )
    return files


def vae_factor(weights: Weights) -> int | None:
    """Return how many pixels a side of one latent stands for; None where no configuration says.

    Source: diffusers' AutoencoderKL halves the size after each block but the last.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = None if weights.hub is not None else config_file(weights)
    if config is None:
        return None
    try:
        return int(2 ** (len(json.loads(config.read_bytes())["block_out_channels"]) - 1))
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            "this is not the configuration of an AutoencoderKL",
            where=config,
            mend="name the folder of a VAE",
        ) from None


def make(
    kind: str, dataset: Dataset | None, model: Model, file_digest: FileDigest = digest.of_file
) -> dict[str, object]:
    """Return the recipe of `latents` or `text`, with the digests of the weights they need.

    Args:
        kind: which of them.
        dataset: its preprocessing; not needed for text.
        model: the encoders.
        file_digest: how a file's digest is found; the planner passes its memo's.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    files = weights_files if model.layout == "plain" else original_files
    if kind == "text":
        recipe = text_recipe(model, text_weights_digests(model, file_digest, files))
        return recipe if model.layout == "plain" else {**recipe, **_wan_text(model)}
    assert dataset is not None
    weights = weights_digest(model.vae, file_digest, files)
    if model.layout == "plain":
        return latents_recipe(dataset, model, weights)
    clip = None if model.clip is None else weights_digest(model.clip, file_digest, files)
    return _wan_latents(dataset, model, weights, clip)


def _wan_latents(
    dataset: Dataset, model: Model, weights: str, clip: str | None
) -> dict[str, object]:
    """Return what shapes Wan's latents besides source, resolution and frames of a clip.

    How many frames a clip has and where it begins is in the key; musubi-tuner neither turns an
    image nor looks at what lies behind a transparent one.
    """
    recipe: dict[str, object] = {
        "format": FORMAT_VERSION,
        "kind": "latents",
        "layout": model.layout,
        "encoder": model.encoder,
        "weights": weights,
        "dtype": model.vae_dtype or model.dtype,
        "image_to_video": model.image_to_video,
        "tiled": model.vae_cache_cpu,
        "fit": dataset.fit,
    }
    if clip is not None:
        recipe["clip"] = clip
    if dataset.fit == "bucket":
        recipe["bucket_no_upscale"] = dataset.bucket_no_upscale
    if dataset.video:
        recipe["source_fps"] = dataset.source_fps
    return recipe


def _wan_text(model: Model) -> dict[str, object]:
    return {
        "layout": model.layout,
        "encoder": model.encoder,
        "dtype": "bfloat16",
        "fp8_t5": model.fp8_t5,
    }


def latents_recipe(dataset: Dataset, model: Model, weights: str) -> dict[str, object]:
    """Return what shapes latents besides the image and the resolution.

    Args:
        dataset: its preprocessing.
        model: its number format and use of the posterior.
        weights: the VAE's digest.
    """
    recipe: dict[str, object] = {
        "format": FORMAT_VERSION,
        "kind": "latents",
        "layout": "plain",
        "weights": weights,
        "dtype": model.vae_dtype or model.dtype,
        "posterior": model.posterior,
        "fit": dataset.fit,
        "exif_rotation": dataset.exif_rotation,
        "background": dataset.background,
    }
    if model.posterior == "sample":
        recipe["posterior_seed"] = model.posterior_seed
    if dataset.fit == "bucket":
        recipe["bucket_reso_steps"] = dataset.bucket_reso_steps
        recipe["bucket_no_upscale"] = dataset.bucket_no_upscale
    return recipe


def text_recipe(model: Model, weights: list[tuple[str, ...]]) -> dict[str, object]:
    """Return what shapes embeddings besides the caption.

    Args:
        model: its text encoders and number format.
        weights: digests of each encoder, of its tokenizer, and of its projection if it has one.
    """
    return {
        "format": FORMAT_VERSION,
        "kind": "text",
        "layout": "plain",
        "dtype": model.text_dtype or model.dtype,
        "encoders": [
            {
                **dict(zip(("weights", "tokenizer", "projection"), digests, strict=False)),
                "max_length": place.max_length,
            }
            for place, digests in zip(model.text, weights, strict=True)
        ],
    }


def text_weights_digests(
    model: Model,
    file_digest: FileDigest = digest.of_file,
    files: Callable[[Weights], list[Path]] = weights_files,
) -> list[tuple[str, ...]]:
    """Return the digests of each text encoder, of its tokenizer, and of its projection if any.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    found: list[tuple[str, ...]] = []
    for place in model.text:
        if place.hub is not None:
            tokenizer = digest.of_value(["hub", place.tokenizer])
        else:
            tokenizer = _files_digest(tokenizer_files(place), file_digest)
        digests = [weights_digest(place, file_digest, files), tokenizer]
        if place.projection is not None:
            code = place.trust_remote_code
            digests.append(projection_digest(place.projection, file_digest, with_code=code))
        found.append(tuple(digests))
    return found
