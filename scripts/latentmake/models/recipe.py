"""Recipes: everything but its source that affects a target's bytes, as plain values with a digest.

Weights enter by the digest of their files, never by their path: a moved model rebuilds nothing, a
changed one rebuilds what depends on it. Of a program that encodes in place of our encoders, its
arguments count here; who knows where its sources lie adds them. Nothing here loads a network. A
file that is missing or cannot be read is a ModelError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.weights import NO_WEIGHTS, TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.layouts.layout import layout_of, released_clip
from latentmake.models.files import (
    checkpoint_of,
    projection_file,
    script_of,
    scripted_files,
    special_tokens,
    tokenizer_files,
    weights_files,
)
from latentmake.models.headers import lack
from latentmake.models.parameterization import scale_parts

if TYPE_CHECKING:
    from latentmake.config.architectures import Encoder

FORMAT_VERSIONS = {"plain": 4, "sdscripts": 2, "wan": 1, "text": 1, "program": 1}
"""By kind of bytes: latents by the encoding of their layout, text, and what other programs encode.
Raised when the same source and settings would give others, and every cache of that kind is then
stale. plain and sdscripts 2: pictures lie contiguous before an AutoencoderKL. plain 3: torch's
Lanczos instead of Pillow's. plain 4: large JPEGs decoded to a fraction, and all convolutions by
oneDNN on a CPU."""

FileDigest = Callable[[Path | digest.Section], str]
START_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"
"""CLIP's tokens around a caption; the second pads it unless a tokenizer says otherwise."""

_READING = "reading of "  # and a token: part of the recipe of texts that contain it
_ZERO = "!"  # token 0 of CLIP's vocabulary
_DTYPES = ("dtype", "vae_dtype", "text_dtype")  # one of which counts for each kind


def make(
    kind: str,
    dataset: Dataset | None,
    model: Model,
    file_digest: FileDigest = digest.of_file,
    place: str | None = None,
) -> dict[str, object]:
    """Return the recipe of `latents`, or of `text`, which needs no dataset; raises ModelError.

    With the `place` of the model in the configuration, its files are inspected and faults name it.
    """
    if place and model.spec.scripts is not None:
        from latentmake.models.checks import encoder_fault

        if wrong := encoder_fault(model, kind):
            raise ModelError(wrong[1], where=f"{place}.{wrong[0]}", hint="name the right file")
    original = model.spec.original_files
    try:
        if not model.spec.encodes:
            return _program_recipe(kind, dataset, model, file_digest)
        if kind == "text":
            digests = [_text_digests(model, x, file_digest) for x in model.text]
            return text_recipe(
                model, digests, [_readings(model, x) for x in range(len(model.text))]
            )
        assert dataset is not None
        own = filter(None, (model.vae, model.clip))
        found = [weights_digest(each, file_digest, original=original) for each in own]
        scale = {} if original else scale_parts(model)
        in_headers = not layout_of(model.layout_name).external
        return latents_recipe(dataset, model, *found) | (scale if in_headers else {})
    except ModelError as error:
        if place is None:
            raise
        where, what = f"{place}.{'vae' if kind == 'latents' else 'text'}", error.what
        raise ModelError(f"{error.where}: {what}", where=where, hint=error.hint) from None


def latents_recipe(
    dataset: Dataset, model: Model, weights: str, clip: str | None = None
) -> dict[str, object]:
    """Return the recipe of latents, from the digests of the VAE and the CLIP image encoder.

    The placement of each image is in its target's own key (`Layout.view`).
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
    if layout.names_architecture:
        recipe["architecture"] = model.architecture
    if model.image_to_video:
        recipe["image_to_video"] = True
    if clip is not None:
        recipe["clip"] = clip
    return recipe


def text_recipe(
    model: Model, weights: list[tuple[str, ...]], readings: Sequence[Mapping[str, str]] = ()
) -> dict[str, object]:
    """Return the recipe of embeddings, from results of `_text_digests` and `_readings`."""
    # Keys of programs alone; with their defaults they change no digest.
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
    """Return the digests of a text encoder, of its tokenizer, and of its projection if any."""
    own, original = place.tokenizer, model.spec.original_files
    if own is not None and own.hub is not None:
        tokenizer = digest.of_value(["hub", own.hub, own.revision, own.subfolder])
    elif place.hub is not None:
        tokenizer = digest.of_value(["hub", own and own.path])
    else:
        tokenizer = files_digest(tokenizer_files(place, umt5=original), file_digest)
    found = (weights_digest(place, file_digest, original=original), tokenizer)
    if place.projection is None:
        return found
    code = place.trust_remote_code
    return (*found, projection_digest(place.projection, file_digest, with_code=code))


def pads_with_zero(weights: Weights) -> bool:
    """Whether captions are padded by the token 0, as OpenCLIP's are, not by the end of text."""
    whole = checkpoint_of(weights)
    return whole is not None and whole.own()[0].endswith(".model.")


def _readings(model: Model, number: int) -> dict[str, str]:
    """Return what counts of a text encoder's tokens, where earlier releases read them otherwise.

    They read captions by the files of the tokenizer alone: a token of padding that stands in a
    caption, as `!` may, was padding in one form of a model and text in another.
    """
    place, clip = model.text[number], released_clip(model, number)
    zero, named = pads_with_zero(place), place.tokenizer
    if clip is None and not zero:
        return {}
    own = {_ZERO} if clip and clip.padding == 0 else set[str]()
    padding: str | None = max(own, default=None)  # on the hub, where no file tells
    if place.hub is None and (named is None or named.hub is None):
        padding, own = special_tokens(tokenizer_files(place))
    if clip is None:
        return {} if _ZERO in own else {f"{_READING}{_ZERO}": "as padding"}
    own -= {START_OF_TEXT, END_OF_TEXT}
    found = {f"{_READING}{token}": "as text" for token in sorted(own)}
    before = _ZERO if zero else padding or END_OF_TEXT
    now = END_OF_TEXT if clip.padding is None else _ZERO
    return found if before == now else found | {"padding": now}


def before_readings(recipe: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the recipe that texts without some tokens had in earlier releases, and these tokens.

    Such texts have the same embedding.
    """
    encoders: list[dict[str, object]] = list(recipe.get("encoders") or ())  # type: ignore[call-overload]
    tokens = [x.removeprefix(_READING) for each in encoders for x in each if _READING in x]
    plain = [{x: each[x] for x in each if _READING not in x} for each in encoders]
    return {**recipe, "encoders": plain}, tokens


# -- encoded by other programs --------------------------------------------------------------------


def encoder_of(model: Model, kind: str) -> Encoder:
    """Return sd-scripts' encoder of `latents` or `text` of a model."""
    strategies = model.spec.strategies
    found = None if strategies is None else strategies.encoder(kind)
    assert found is not None  # or our encoders make its caches
    return found


def options_of(model: Model, kind: str) -> dict[str, object]:
    """Return flag -> value of the options of sd-scripts' encoder that the model sets."""
    from latentmake.config.architectures import options_in

    return options_in(model.further_arguments(kind), encoder_of(model, kind).options)


def _program_recipe(
    kind: str, dataset: Dataset | None, model: Model, file_digest: FileDigest
) -> dict[str, object]:
    own = _scripted if model.spec.strategies is None else _by_strategy
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
    files = script_of(model, kind).files
    digests = _digests(model, [file.key for file in files], file_digest)
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    return {
        "weights": {file.flag: digests[file.key] for file in files if file.key in digests},
        "arguments": [*model.version.caching(kind), *model.further_arguments(kind)],
        **({} if dtype is None else {"dtype": dtype}),
    }


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
        if encoder.options[flag].kind == "path":  # the content counts
            files = scripted_files(Path(str(value)))
            options[flag] = digest.of_value([[each.name, file_digest(each)] for each in files])
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
    """Return the digest of the weights that each of some keys of a model names, if it is set."""
    found = {}
    for key in keys:
        if (weights := model.weights(key)) is not None:
            root = Path(weights.local)
            files = scripted_files(root)
            names = [str(file.relative_to(root)) if root.is_dir() else "" for file in files]
            found[key] = files_digest(files, file_digest, names)
    return found


# -- digests --------------------------------------------------------------------------------------


def weights_digest(
    weights: Weights, file_digest: FileDigest = digest.of_file, *, original: bool = False
) -> str:
    """Return the digest of a network: its files' content, or a hub id at its revision.

    Of a complete checkpoint the tensors of the part count: another one with the same VAE makes the
    same latents.

    The planner passes its memo's `file_digest`; for `original` see `weights_files`.
    """
    if weights.hub is not None:
        return digest.of_value(["hub", weights.hub, weights.revision, weights.subfolder])
    whole = checkpoint_of(weights)
    files = [whole.section()] if whole else weights_files(weights, original=original)
    return files_digest(files, file_digest)


def files_digest(
    files: Sequence[Path | digest.Section],
    file_digest: FileDigest,
    names: Sequence[str] | None = None,
) -> str:
    """Return the digest of some files by their content, and by their names where these count."""
    try:
        digests = [file_digest(file) for file in files]
    except OSError as error:
        what, hint = f"cannot be read ({error.strerror})", "check the file's permissions"
        raise ModelError(what, where=str(error.filename), hint=hint) from None
    if names is None:
        return digest.of_value(digests)
    return digest.of_value([list(each) for each in zip(names, digests, strict=True)])


def projection_digest(
    path: str, file_digest: FileDigest = digest.of_file, *, with_code: bool = False
) -> str:
    """Return the digest of a text projection, `with_code` of the pipeline's Python files too."""
    files = [projection_file(path)]
    if with_code:
        beside = [file for file in files[0].parent.iterdir() if file.suffix in (".py", ".json")]
        files += sorted([*beside, *Path(path).glob("*.py")])
    return files_digest(files, file_digest)
