"""Recipes of caches that musubi-tuner's scripts make, for architectures without encoders of ours.

All that its row says a script gets is in the recipe: the content of each file of weights, and the
arguments. The sources of the script are added by who knows where they lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.rows import Script
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.geometry.buckets import Size, wan_size
from latentmake.geometry.clips import AnyClip, Media
from latentmake.models.files import refuse_missing

FORMAT_VERSION = 1
"""Raised when the same source and settings would be encoded otherwise."""

_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
FileDigest = Callable[[Path], str]


def script_of(model: Model, kind: str) -> Script:
    """Return the script that caches `latents` or `text` of a model of musubi-tuner."""
    scripts = model.spec.scripts
    assert scripts is not None
    return scripts.text if kind == "text" else scripts.latents


def scripted_files(weights: Weights) -> list[Path]:
    """Return the files that a script reads of a local file or folder of weights.

    A file that is one shard of several stands for all of them.

    Raises:
        ModelError: nothing is there, a shard is missing, or a folder is empty.
    """
    refuse_missing(weights)
    path = Path(weights.path or "")
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file())
        if not found:
            raise ModelError("this model folder is empty", where=path, hint="copy the model again")
        return found
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    count = int(shard[2])
    names = (f"{shard[1]}-{each + 1:05d}-of-{shard[2]}{shard[3]}" for each in range(count))
    shards = [path.with_name(name) for name in names]
    for each in shards:
        if not each.is_file():
            hint = "copy the model again"
            raise ModelError("these weights are missing", where=each, hint=hint)
    return shards


def scripted_recipe(
    kind: str, dataset: Dataset | None, model: Model, file_digest: FileDigest
) -> dict[str, object]:
    """Return the recipe of `latents`, or of `text`, which needs no dataset.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    script = script_of(model, kind)
    found = weights_digests(model, [file.key for file in script.files], file_digest)
    recipe: dict[str, object] = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "layout": model.layout,
        "architecture": model.architecture,
        "weights": {file.flag: found[file.key] for file in script.files if file.key in found},
        "arguments": [
            *model.version.caching(kind),
            *model.further_arguments(kind),
        ],
    }
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    if dtype is not None:
        recipe["dtype"] = dtype
    if kind == "latents":
        assert dataset is not None
        recipe |= shaping(dataset, "latents", model.layout, defaults=False)
    return recipe


def frames_and_sides(
    model: Model, settings: Dataset, media: Media, resolution: Size, clip: AnyClip | None
) -> tuple[str, str]:
    """Return the frames and the sides of an item's latents, as names of tensors have them.

    Returns:
        A pattern of the number of frames, and `{height}x{width}`.
    """
    scripts = model.spec.scripts
    assert scripts is not None
    size = wan_size(
        Size(media.width, media.height),
        resolution,
        bucket=settings.fit == "bucket",
        no_upscale=settings.bucket_no_upscale,
        step=model.spec.side,
    )
    frames = str(1 if clip is None else (clip.frames - 1) // scripts.frames + 1)
    if scripts.sections or scripts.layers:
        frames = "[0-9]+"  # as many as a section has, or an item layers
    width, height = latents_size(model, size)
    return frames, f"{height}x{width}"


def latents_size(model: Model, size: Size) -> Size:
    """Return the width and height of the latents of a picture that was brought to a size."""
    scripts = model.spec.scripts
    assert scripts is not None
    side = max((scripts.rounded.get(each, 1) for each in model.latents_arguments), default=1)
    width, height = (-(-length // side) * side // scripts.pixels for length in size)
    return Size(width, height)


def weights_digests(model: Model, keys: Iterable[str], file_digest: FileDigest) -> dict[str, str]:
    """Return the digest of the weights that each of some keys of a model names, if it is set.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    found = {}
    for key in keys:
        weights = model.weights(key)
        if weights is None:
            continue
        root, files = Path(weights.local), scripted_files(Weights(path=weights.local))
        try:
            named = [
                [str(each.relative_to(root)) if root.is_dir() else "", file_digest(each)]
                for each in files
            ]
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
            hint = "check the file's permissions"
            raise ModelError(what, where=str(error.filename), hint=hint) from None
        found[key] = digest.of_value(named)
    return found
