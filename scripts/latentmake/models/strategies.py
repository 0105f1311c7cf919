"""Recipes of caches that sd-scripts' own strategies make, where there are no encoders of ours.

The recipe holds all that a strategy gets: the content of each file of weights, dtypes and options.
The sources of sd-scripts are added by who knows where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.rows import Encoder, Network, options_in
from latentmake.config.weights import NO_WEIGHTS, Weights
from latentmake.errors import ModelError
from latentmake.models.scripted import scripted_files, weights_digests
from latentmake.models.weight_kinds import content_of

FORMAT_VERSION = 1
"""Raised when the same source and settings would be encoded otherwise."""


def encoder_of(model: Model, kind: str) -> Encoder:
    """Return sd-scripts' encoder of `latents` or `text` of a model."""
    strategies = model.spec.strategies
    found = None if strategies is None else strategies.encoder(kind)
    assert found is not None  # or our encoders make its caches
    return found


def options_of(model: Model, kind: str) -> dict[str, object]:
    """Return flag -> value of the options of an encoder that the model sets."""
    arguments = model.further_arguments(kind)
    return options_in(arguments, encoder_of(model, kind).options)


def strategies_recipe(
    kind: str, dataset: Dataset | None, model: Model, file_digest: Callable[[Path], str]
) -> dict[str, object]:
    """Return the recipe of `latents`, or of `text`, which needs no dataset.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    encoder = encoder_of(model, kind)
    keys = [network.key for network in encoder.networks]
    for network in encoder.networks:
        _refuse_another(model, network)
    recipe: dict[str, object] = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "layout": model.layout,
        "architecture": model.architecture,
        "weights": weights_digests(model, keys, file_digest),
        "options": dict(_options(model, kind, file_digest)),
    }
    if not encoder.fixed:
        text = kind == "text"
        recipe["dtype"] = model.caption_dtype if text else model.vae_dtype or model.dtype
    if kind == "latents":
        assert dataset is not None
        recipe |= shaping(dataset, "latents", model.layout, defaults=False)
        if model.posterior == "sample":
            recipe["posterior_seed"] = model.posterior_seed
    return recipe


def _refuse_another(model: Model, network: Network) -> None:
    """Refuse a file of another network, by the names of its tensors; raises ModelError."""
    path = Path((model.weights(network.key) or NO_WEIGHTS).path or "")
    if not path.is_file():
        return  # a folder, or said by who digests it
    hint = "name the file that docs/trainers/sdscripts.md does"
    try:
        found = content_of(path)
    except ValueError as error:
        raise ModelError(str(error), where=path, hint=hint) from None
    except OSError:
        return
    if not any(mark in name for mark in network.marks for name in found.tensors):
        kind = f", but a {found.kind}" if found.kind else ""
        what = f"holds no `{network.key}` of {model.title}{kind}"
        raise ModelError(what, where=path, hint=hint)


def _options(
    model: Model, kind: str, file_digest: Callable[[Path], str]
) -> Iterator[tuple[str, object]]:
    """Yield flag and value of the options that shape bytes; in place of a path what lies there."""
    known = encoder_of(model, kind).options
    for flag, value in options_of(model, kind).items():
        if known[flag].kind == "path":
            files = scripted_files(Weights(path=str(value)))
            yield flag, digest.of_value([[each.name, file_digest(each)] for each in files])
        elif known[flag].kind != "cache":
            yield flag, value
