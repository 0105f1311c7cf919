"""Recipes: plain values, with a digest, of everything but the source that affects a target's bytes.

A recipe contains the digests of weight files, never their paths. So moving a model rebuilds
nothing, and changing it rebuilds only its own targets. For targets that another program encodes,
the recipe contains the program's arguments; `plan.facts` adds the digest of its installation. This
module loads no network. A file that is missing or cannot be read raises a ModelError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from latentmake.base import digest
from latentmake.base.errors import ModelError
from latentmake.config.datasets import Dataset
from latentmake.config.fields import shaping
from latentmake.config.makers import Encoder, options_in
from latentmake.config.models import Model
from latentmake.config.weights import NO_WEIGHTS, TextWeights, Weights
from latentmake.layouts.layout import layout_of, released_clip
from latentmake.models.files import (
    checkpoint_of,
    projection_file,
    scripted_files,
    special_tokens,
    tokenizer_files,
    weights_files,
)
from latentmake.models.headers import lack
from latentmake.models.parameterization import scale_parts

FORMAT_VERSIONS = {"plain": 4, "sdscripts": 2, "wan": 1, "text": 1, "program": 1}
"""Kind of bytes -> version. Kinds are encodings of layouts (latents), `text`, and `program` (for
targets that other programs encode). Raise a version when the same source and settings give other
bytes; all caches of the kind then become stale. plain and sdscripts 2: pictures are contiguous in
memory when an AutoencoderKL encodes them. plain 3: torch's Lanczos instead of Pillow's. plain 4:
large JPEGs are decoded at a fraction of their size, and a CPU uses oneDNN for all convolutions."""

FileDigest = Callable[[Path | digest.Section], str]
START_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"
"""CLIP's tokens around a caption. The second is also the padding, by default."""

_READING = "reading of "  # followed by a token: key in the recipe of texts with this token
_ZERO = "!"  # token 0 in CLIP's vocabulary
_DTYPES = ("dtype", "vae_dtype", "text_dtype")  # the recipe of a kind contains one, as `dtype`


def make(
    kind: str,
    dataset: Dataset | None,
    model: Model,
    file_digest: FileDigest = digest.of_file,
    place: str | None = None,
) -> dict[str, object]:
    """Return the recipe of a dataset's latents, or of text embeddings.

    Args:
        kind: `latents` or `text`.
        dataset: settings of the dataset; not needed for `text`.
        model: model with the paths of its parts.
        file_digest: digest of a file, such as the memo's.
        place: key of the model in the configuration. If given, files for scripts are inspected
            first, and errors name this key.

    Raises:
        ModelError: a file is missing, cannot be read or is the wrong one.
    """
    if place and model.spec.encoder_files(kind):
        from latentmake.models.inspection import encoder_fault

        if wrong := encoder_fault(model, kind):
            raise ModelError(wrong[1], where=f"{place}.{wrong[0]}", hint="name the right file")
    original = model.spec.original_files
    try:
        if not model.spec.encodes:
            return _program_recipe(kind, dataset, model, file_digest)
        if kind == "text":
            digests = [_text_digests(model, encoder, file_digest) for encoder in model.text]
            readings = [_readings(model, number) for number in range(len(model.text))]
            return text_recipe(model, digests, readings)
        assert dataset is not None
        encoders = filter(None, (model.vae, model.clip))
        weights = [weights_digest(encoder, file_digest, original=original) for encoder in encoders]
        scale = {} if original else scale_parts(model)
        in_headers = not layout_of(model.layout_name).external
        return latents_recipe(dataset, model, *weights) | (scale if in_headers else {})
    except ModelError as error:
        if place is None:
            raise
        where, what = f"{place}.{'vae' if kind == 'latents' else 'text'}", error.what
        raise ModelError(f"{error.where}: {what}", where=where, hint=error.hint) from None


def latents_recipe(
    dataset: Dataset, model: Model, weights: str, clip: str | None = None
) -> dict[str, object]:
    """Return the recipe of latents, from the digests of the VAE and the CLIP image encoder.

    The placement of an image is part of its target's key (`Layout.view`), not of the recipe.
    """
    layout = layout_of(model.layout_name)
    own = shaping(model, "latents", model.layout, defaults=False)
    recipe: dict[str, object] = {
        "format": FORMAT_VERSIONS[layout.encoding],
        "kind": "latents",
        "layout": model.layout,
        "weights": weights,
        "dtype": model.vae_dtype or model.dtype,
        **shaping(dataset, "latents", model.layout, defaults=False),
        **{key: own[key] for key in own if key not in (*_DTYPES, "architecture", "task")},
    }
    if layout.like_sdscripts:
        recipe["architecture"] = model.architecture
    if model.image_to_video:
        recipe["image_to_video"] = True
    if clip is not None:
        recipe["clip"] = clip
    return recipe


def text_recipe(
    model: Model, weights: list[tuple[str, ...]], readings: Sequence[Mapping[str, str]] = ()
) -> dict[str, object]:
    """Return the recipe of embeddings, from the results of `_text_digests` and `_readings`."""
    # Only other programs use these keys, so their defaults must not change the digest.
    without = {*_DTYPES, "task"}
    without |= {key for key in ("architecture", "text_arguments") if not getattr(model, key)}
    own = shaping(model, "text", model.layout)
    return {
        "format": FORMAT_VERSIONS["text"],
        "kind": "text",
        "dtype": model.caption_dtype,
        "encoders": [
            {
                **dict(zip(("weights", "tokenizer", "projection"), digests, strict=False)),
                "max_length": place.max_length,
                **reading,
            }
            for place, digests, reading in zip(
                model.text, weights, readings or [{}] * len(weights), strict=True
            )
        ],
        **{key: own[key] for key in own if key not in without},
    }


def _text_digests(model: Model, place: TextWeights, file_digest: FileDigest) -> tuple[str, ...]:
    """Return the digests of a text encoder, its tokenizer and, if there is one, its projection."""
    own, original = place.tokenizer, model.spec.original_files
    if own is not None and own.hub is not None:
        tokenizer = digest.of_value(["hub", own.hub, own.revision, own.subfolder])
    elif place.hub is not None:
        tokenizer = digest.of_value(["hub", own and own.path])
    else:
        tokenizer = files_digest(tokenizer_files(place, umt5=original), file_digest)
    digests = (weights_digest(place, file_digest, original=original), tokenizer)
    if place.projection is None:
        return digests
    code = place.trust_remote_code
    return (*digests, projection_digest(place.projection, file_digest, with_code=code))


def pads_with_zero(weights: Weights) -> bool:
    """Whether captions are padded with token 0, as for OpenCLIP, not with the end of text."""
    checkpoint = checkpoint_of(weights)
    return checkpoint is not None and checkpoint.own()[0].endswith(".model.")


def _readings(model: Model, number: int) -> dict[str, str]:
    """Return how a text encoder reads some tokens, if earlier releases read them differently.

    Earlier releases took special tokens from the tokenizer's files only. If a caption contained a
    padding token, such as `!`, it was read as padding for one form of a model, and as text for
    another. The recipe therefore records the present reading.
    """
    place, clip = model.text[number], released_clip(model, number)
    zero, named = pads_with_zero(place), place.tokenizer
    if clip is None and not zero:
        return {}
    own = {_ZERO} if clip and clip.padding == 0 else set[str]()
    padding: str | None = max(own, default=None)  # for tokenizers on the hub: no file to read
    if place.hub is None and (named is None or named.hub is None):
        padding, own = special_tokens(tokenizer_files(place))
    if clip is None:
        return {} if _ZERO in own else {f"{_READING}{_ZERO}": "as padding"}
    own -= {START_OF_TEXT, END_OF_TEXT}
    readings = {f"{_READING}{token}": "as text" for token in sorted(own)}
    before = _ZERO if zero else padding or END_OF_TEXT
    now = END_OF_TEXT if clip.padding is None else _ZERO
    return readings if before == now else readings | {"padding": now}


def before_readings(recipe: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return a recipe as earlier releases made it, and the tokens that they read differently.

    Captions without these tokens have the same embedding under both recipes.
    """
    encoders: list[dict[str, object]] = list(recipe.get("encoders") or ())  # type: ignore[call-overload]
    keys = [key for encoder in encoders for key in encoder if _READING in key]
    tokens = [key.removeprefix(_READING) for key in keys]
    plain = [{key: encoder[key] for key in encoder if _READING not in key} for encoder in encoders]
    return {**recipe, "encoders": plain}, tokens


# -- targets that other programs encode -----------------------------------------------------------


def encoder_of(model: Model, kind: str) -> Encoder:
    """Return sd-scripts' encoder for the `latents` or `text` of a model."""
    encoder = model.spec.encoder(kind)
    assert encoder is not None  # callers exclude models that Latentmake encodes itself
    return encoder


def options_of(model: Model, kind: str) -> dict[str, object]:
    """Return flag -> value of the options that the model sets for sd-scripts' encoder."""
    return options_in(model.further_arguments(kind), encoder_of(model, kind).options)


def _program_recipe(
    kind: str, dataset: Dataset | None, model: Model, file_digest: FileDigest
) -> dict[str, object]:
    own = _by_strategy if model.spec.encoder(kind) else _scripted
    recipe: dict[str, object] = {
        "format": FORMAT_VERSIONS["program"],
        "kind": kind,
        "layout": model.layout,
        "architecture": model.architecture,
        **own(model, kind, file_digest),
    }
    if kind == "latents":
        assert dataset is not None
        recipe |= shaping(dataset, "latents", model.layout, defaults=False)
        if model.posterior == "sample":
            recipe["posterior_seed"] = model.posterior_seed
    return recipe


def _scripted(model: Model, kind: str, file_digest: FileDigest) -> dict[str, object]:
    files = model.spec.scripts.caching(kind).files
    digests = _digests(model, [file.key for file in files], file_digest)
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    recipe: dict[str, object] = {
        "weights": {file.flag: digests[file.key] for file in files if file.key in digests},
        "arguments": [*model.version.caching(kind), *model.further_arguments(kind)],
    }
    if dtype is not None:
        recipe["dtype"] = dtype
    return recipe


def _by_strategy(model: Model, kind: str, file_digest: FileDigest) -> dict[str, object]:
    encoder = encoder_of(model, kind)
    for network in encoder.networks:
        path = Path((model.weights(network.key) or NO_WEIGHTS).path or "")
        what = f"`{network.key}` of {model.title}"
        if path.is_file() and (fault := lack(path, network.marks, what)):
            hint = "name the file that docs/trainers/sdscripts.md does"
            raise ModelError(fault, where=path, hint=hint)
    options: dict[str, object] = {}
    for flag, value in options_of(model, kind).items():
        if encoder.options[flag].kind == "path":  # the recipe contains the digest of the content
            files = scripted_files(Path(str(value)))
            options[flag] = digest.of_value([[file.name, file_digest(file)] for file in files])
        elif encoder.options[flag].kind != "cache":
            options[flag] = value
    recipe: dict[str, object] = {
        "weights": _digests(model, [network.key for network in encoder.networks], file_digest),
        "options": options,
    }
    if not encoder.fixed:
        dtype = model.caption_dtype if kind == "text" else model.vae_dtype or model.dtype
        recipe["dtype"] = dtype
    return recipe


def _digests(model: Model, keys: Iterable[str], file_digest: FileDigest) -> dict[str, str]:
    """Return key -> digest of the weights at these keys of a model; skip keys that are not set."""
    digests = {}
    for key in keys:
        if (weights := model.weights(key)) is not None:
            root = Path(weights.local)
            files = scripted_files(root)
            names = [str(file.relative_to(root)) if root.is_dir() else "" for file in files]
            digests[key] = files_digest(files, file_digest, names)
    return digests


# -- digests --------------------------------------------------------------------------------------


def weights_digest(
    weights: Weights, file_digest: FileDigest = digest.of_file, *, original: bool = False
) -> str:
    """Return the digest of a network: of its files' content, or of its hub id and revision.

    For a complete checkpoint, the digest covers only the tensors of the part: another checkpoint
    with the same VAE gives the same latents.

    Args:
        weights: network.
        file_digest: digest of a file; the planner passes its memo's.
        original: see `weights_files`.
    """
    if weights.hub is not None:
        return digest.of_value(["hub", weights.hub, weights.revision, weights.subfolder])
    checkpoint = checkpoint_of(weights)
    files = [checkpoint.section()] if checkpoint else weights_files(weights, original=original)
    return files_digest(files, file_digest)


def files_digest(
    files: Sequence[Path | digest.Section],
    file_digest: FileDigest,
    names: Sequence[str] | None = None,
) -> str:
    """Return the digest of the content of files and, if `names` are given, of these names."""
    try:
        digests = [file_digest(file) for file in files]
    except OSError as error:
        what, hint = f"cannot be read ({error.strerror})", "check the file's permissions"
        raise ModelError(what, where=str(error.filename), hint=hint) from None
    if names is None:
        return digest.of_value(digests)
    return digest.of_value([list(pair) for pair in zip(names, digests, strict=True)])


def projection_digest(
    path: str, file_digest: FileDigest = digest.of_file, *, with_code: bool = False
) -> str:
    """Return the digest of a text projection; `with_code` includes the pipeline's Python files."""
    files = [projection_file(path)]
    if with_code:
        beside = [file for file in files[0].parent.iterdir() if file.suffix in (".py", ".json")]
        files += sorted([*beside, *Path(path).glob("*.py")])
    return files_digest(files, file_digest)
