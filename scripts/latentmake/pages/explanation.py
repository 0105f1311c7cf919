"""Differences between recipes and placements of cache files, named as in the configuration."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from latentmake.base.errors import CacheError, SourceError
from latentmake.config.datasets import Dataset
from latentmake.config.machines import PROGRAMS
from latentmake.config.models import Model
from latentmake.data.item import Item
from latentmake.formats.cachefile import Header, read_header, read_metadata, recipe_of, target_key
from latentmake.layouts.layout import kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge
from latentmake.plan.orders import Part, Target, view_of
from latentmake.plan.product import Difference, is_digest, short, some, text_of, value_differences
from latentmake.plan.run_plan import RunPlan

PLACED = "size and crop"
"""Name of a difference between two placements (sizes and crops) of an image."""

_DEFAULTS = {
    key: field.get_default(call_default_factory=True)
    for section in (Model, Dataset)
    for key, field in section.model_fields.items()
    if key != "dtype" and not field.is_required()
}
"""Key -> default. A recipe leaves out a key whose value is the default."""

_NAMES = {
    "format": "format version",
    "vae": "VAE",
    "weights": "VAE",
    "clip": "CLIP image encoder",
    "text": "text encoder",
}


# -- recipes --------------------------------------------------------------------------------------


def recipe_differences(
    old: Mapping[str, object], new: Mapping[str, object], model: Model | None = None
) -> list[Difference]:
    """Return the differences between two recipes of one kind.

    Args:
        old: recipe in the header of a file.
        new: recipe of today.
        model: model of the recipe `new`. With it, the digest of weights is followed by their path.
    """
    before, now, places = _values(old), _values(new), _places(model) if model else {}
    changed = []
    for name in dict.fromkeys((*now, *before)):
        default = _DEFAULTS.get(name, "absent")
        was, value = (text_of(values.get(name, default)) for values in (before, now))
        if was != value and (is_digest(was) or is_digest(value)):
            place = places.get(name, "") if name in now else ""
            changed.append(Difference(f"{name}'s digest", short(was), short(value) + place))
        elif was != value:
            changed.append(Difference(name, was, value))
    return changed


def recipe_words(recipe: Mapping[str, object]) -> str:
    """Return a recipe as one line of text."""
    texts = {name: text_of(value) for name, value in _values(recipe).items() if name != "kind"}
    return ", ".join(f"{name} {short(text)}" for name, text in texts.items() if text != "none")


def program_of(recipe: Mapping[str, object]) -> str:
    """Return the name of the program that encodes by a recipe; "" for Latentmake itself."""
    return PROGRAMS.get(str(recipe.get("layout")), "a program") if "program" in recipe else ""


def _values(recipe: Mapping[str, Any]) -> dict[str, object]:
    """Return name -> part of a recipe; names are `VAE`, `text encoder 2's tokenizer`, `dtype`."""
    parts: dict[str, object] = {}
    for key, value in recipe.items():
        if key == "encoders":
            for number, encoder in enumerate(value):
                name = _name(f"text.{number}")
                for part, part_value in encoder.items():
                    parts[name if part == "weights" else f"{name}'s {part}"] = part_value
        elif isinstance(value, dict):  # weights and options of other programs
            parts |= {_name(inner): value[inner] for inner in value}
        else:
            parts[program_of(recipe) if key == "program" else _name(key)] = value
    return parts


def _name(key: str) -> str:
    """Return the name of a part of a recipe, or of the weights under a key of a model."""
    name, _, number = key.partition(".")
    return _NAMES.get(name, name) + (f" {int(number) + 1}" if int(number or 0) else "")


def _places(model: Model) -> dict[str, str]:
    """Return name in a recipe -> path in brackets, for each network of a model."""
    # `files` lists the encoders first. If the network that is trained has the same flag as an
    # encoder, reversing keeps the encoder.
    keys = {file.flag: file.key for file in reversed(model.files.values())}
    own = ("vae", "clip", *(f"text.{number}" for number in range(len(model.text))))
    keys |= {_name(key): key for key in (*own, *model.files)}
    weights = {name: model.weights(key) for name, key in keys.items()}
    return {name: f" ({file.path or file.hub})" for name, file in weights.items() if file}


# -- targets --------------------------------------------------------------------------------------


def recipe_changes(facts: Facts, runs: Collection[RunPlan]) -> Iterator[str]:
    """Yield a line for all targets of a model and kind that are stale for the same differences.

    For each dataset and each recipe of its files, the header of one cache file is read.
    """
    alike: dict[tuple[str, str, str, str], list[tuple[Part, Item, Target]]] = defaultdict(list)
    for part, state in {part: state for run in runs for part, state in run.parts.items()}.items():
        kind = kind_of(part.name)
        for item, target in (
            (work.item, target) for work in state.stale for target in work.targets
        ):
            if target.reason == "changed recipe":
                alike[part.dataset, part.maker, kind, target.recipe].append((part, item, target))
    counts: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (dataset, model, kind, _), targets in alike.items():
        counts[model, kind, _in_words(facts, *targets[0])][dataset] += len(targets)
    for (model, kind, words), datasets in counts.items():
        whose = f" ({model})" if len(facts.config.models) > 1 else ""
        number = sum(datasets.values())
        what = "texts" if kind == "text" and number > 1 else kind
        yield f"recipe: {words}: {number} {what} of {some(datasets)}{whose}"


def _in_words(facts: Facts, part: Part, item: Item, target: Target) -> str:
    if not facts.recipe_of(part):
        return f"unknown without the model {part.maker}"
    changed = differences(facts, part, item, target)
    settings = some([str(difference) for difference in changed if difference.name != PLACED])
    return settings or (PLACED if changed else "keys in headers")


def differences(facts: Facts, part: Part, item: Item, target: Target) -> list[Difference]:
    """Return the differences between the recipe and placement of a file and today's."""
    now = facts.recipe_of(part)
    metadata, model = read_metadata(target.path), facts.config.models.get(part.model)
    # Some values of the recipe, such as the scale, are keys of their own in a header.
    recipe = {key: metadata[key] for key in now if key in metadata} | recipe_of(metadata)
    changed = recipe_differences(recipe, now, model) if now else []
    judge = Judge(facts, part.dataset, part.model, [part.name], [item], [target.path])
    with suppress(CacheError, SourceError, OSError, ValueError):
        changed += placing_differences(judge, item, target)
    return changed


def placing_differences(judge: Judge, item: Item, target: Target) -> list[Difference]:
    """Return the differences between the placement of an image in a file and today's.

    The settings that changed the placement come first, the placement itself comes last. If an
    earlier release wrote the file, its header does not contain the settings.
    """
    header, today = read_header(target.path), judge.settings
    size = judge.contents.size(item, header.source, header)
    now = judge.view(item, target, header.source, header)
    if not (today and size and now) or _has_view(header, now):
        return []
    before = today.placed(json.loads(header.view or "{}"))
    was, _ = view_of(judge.layout, before, item, target, size)
    if not _has_view(header, was):
        return [Difference(PLACED, "others", now)]
    changed = value_differences(before.model_dump(), today.model_dump())
    return [*changed, Difference(PLACED, was, now)]


def _has_view(header: Header, view: str) -> bool:
    return header.key == target_key(header.source, header.recipe, view)
