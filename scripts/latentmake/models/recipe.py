"""Recipes: everything but its source that affects a target's bytes, as plain values with a digest.

Weights enter by the digest of their files, never by their path: a moved model rebuilds nothing, a
changed one rebuilds what depends on it. Nothing here loads a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from latentmake import digest, layouts
from latentmake.config.datasets import Dataset
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.models import checkpoints
from latentmake.models.files import (
    encoder_files,
    projection_file,
    refuse_missing,
    tokenizer_files,
    weights_files,
)

FORMAT_VERSIONS = {"plain": 4, "sdscripts": 2, "wan": 1, "text": 1}
"""By kind of bytes: latents by the encoding of their layout, and text. Raised when the same source
and settings would give others, and every cache of that kind is then stale. plain and sdscripts 2:
pictures lie contiguous before an AutoencoderKL. plain 3: torch's Lanczos instead of Pillow's.
plain 4: large JPEGs decoded to a fraction, and all convolutions by oneDNN on a CPU."""

NEW = "new"
"""In place of a projection's path: it begins with random weights."""

FileDigest = Callable[[Path | digest.Section], str]
_DTYPES = ("dtype", "vae_dtype", "text_dtype")  # one of which counts for each kind


def weights_digest(
    weights: Weights,
    file_digest: FileDigest = digest.of_file,
    files: Callable[[Weights], list[Path]] = weights_files,
) -> str:
    """Return the digest of a network: its files' content, or a hub id at its revision.

    Of a complete checkpoint the tensors of the part count: another one with the same VAE makes the
    same latents.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    if weights.hub is not None:
        return digest.of_value(["hub", weights.hub, weights.revision, weights.subfolder])
    own = checkpoints.section_of(weights)
    return _files_digest(files(weights) if own is None else [own], file_digest)


def _files_digest(files: Sequence[Path | digest.Section], file_digest: FileDigest) -> str:
    try:
        return digest.of_value([file_digest(file) for file in files])
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        hint = "check the file's permissions"
        raise ModelError(what, where=str(error.filename), hint=hint) from None


def projection_digest(
    path: str, file_digest: FileDigest = digest.of_file, *, with_code: bool = False
) -> str:
    """Return the digest of a text projection, `with_code` of the pipeline's Python files too.

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
    """Return the digest of a training's start: the network and its noise schedule.

    Args:
        unet: the network.
        scheduler: folder of the noise schedule; "" for that of the network's hub repository.
        file_digest: the planner passes its memo's.
        text_projection: None, `new`, or a path.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    refuse_missing(unet)
    schedule = Path(scheduler) / "scheduler_config.json"
    if not scheduler:
        schedule_digest = digest.of_value(["hub", unet.hub, unet.revision, "scheduler"])
    elif schedule.is_file():
        schedule_digest = _files_digest([schedule], file_digest)
    else:
        hint = "name the folder of a diffusers scheduler as the model's `scheduler`"
        raise ModelError("this noise schedule does not exist", where=schedule, hint=hint)
    parts = [weights_digest(unet, file_digest), schedule_digest]
    if text_projection is not None:
        new = text_projection == NEW
        parts.append(NEW if new else projection_digest(text_projection, file_digest))
    return digest.of_value(parts)


def make(
    kind: str, dataset: Dataset | None, model: Model, file_digest: FileDigest = digest.of_file
) -> dict[str, object]:
    """Return the recipe of `latents`, or of `text`, which needs no dataset.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    if not model.spec.encodes and model.spec.strategies is not None:
        from latentmake.models.strategies import strategies_recipe

        return strategies_recipe(kind, dataset, model, file_digest)
    if not model.spec.encodes:
        from latentmake.models.scripted import scripted_recipe

        return scripted_recipe(kind, dataset, model, file_digest)
    if kind == "text":
        return text_recipe(model, [_text_digests(model, x, file_digest) for x in model.text])
    assert dataset is not None
    files = partial(encoder_files, model)
    clip = None if model.clip is None else weights_digest(model.clip, file_digest, files)
    return latents_recipe(dataset, model, weights_digest(model.vae, file_digest, files), clip)


def latents_recipe(
    dataset: Dataset, model: Model, weights: str, clip: str | None = None
) -> dict[str, object]:
    """Return the recipe of latents, from the digests of the VAE and the CLIP image encoder.

    The placement of each image is in its target's own key (`Layout.variant`).
    """
    layout = layouts.of(model.layout_name)
    recipe: dict[str, object] = {
        "format": FORMAT_VERSIONS[layout.encoding],
        "kind": "latents",
        "layout": model.layout,
        "weights": weights,
        "dtype": model.vae_dtype or model.dtype,
        **shaping(dataset, "latents", model.layout, defaults=False),
        **_without(shaping(model, "latents", model.layout, defaults=False), "architecture", "task"),
    }
    if layout.names_architecture:
        recipe["architecture"] = model.architecture
    if model.image_to_video:
        recipe["image_to_video"] = True
    if clip is not None:
        recipe["clip"] = clip
    return recipe


def text_recipe(model: Model, weights: list[tuple[str, ...]]) -> dict[str, object]:
    """Return the recipe of embeddings, from digests as `_text_digests` returns them."""
    # Keys of scripts alone; with their defaults they change no digest.
    own = _without(shaping(model, "text", model.layout), "task")
    if model.architecture is None:
        del own["architecture"]
    if not model.text_arguments:
        del own["text_arguments"]
    return {
        "format": FORMAT_VERSIONS["text"],
        "kind": "text",
        "dtype": model.caption_dtype,
        "encoders": [
            {
                **dict(zip(("weights", "tokenizer", "projection"), digests, strict=False)),
                "max_length": place.max_length,
            }
            for place, digests in zip(model.text, weights, strict=True)
        ],
        **own,
    }


def _without(values: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key not in (*_DTYPES, *keys)}


def _text_digests(model: Model, place: TextWeights, file_digest: FileDigest) -> tuple[str, ...]:
    """Return the digests of a text encoder, of its tokenizer, and of its projection if any."""
    own = place.tokenizer
    if own is not None and own.hub is not None:
        tokenizer = digest.of_value(["hub", own.hub, own.revision, own.subfolder])
    elif place.hub is not None:
        tokenizer = digest.of_value(["hub", own and own.path])
    else:
        umt5 = "umT5" in model.spec.text_encoders
        tokenizer = _files_digest(tokenizer_files(place, umt5=umt5), file_digest)
    found = (weights_digest(place, file_digest, partial(encoder_files, model)), tokenizer)
    if place.projection is None:
        return found
    code = place.trust_remote_code
    return (*found, projection_digest(place.projection, file_digest, with_code=code))
