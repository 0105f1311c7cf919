"""What differs in the recipes and placements of cache files, in the configuration's words."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.config.machines import PROGRAMS
from latentmake.config.models import Model
from latentmake.errors import CacheError, SourceError
from latentmake.files.cachefile import Header, read_header, read_metadata, recipe_of, target_key
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Part, view_of
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import (
    Difference,
    Judge,
    Stale,
    is_digest,
    short,
    some,
    text_of,
    value_differences,
)

PLACED = "size and crop"
"""Name of the difference between two placements of an image."""

_DEFAULTS = {
    key: field.get_default(call_default_factory=True)
    for section in (Model, Dataset)
    for key, field in section.model_fields.items()
    if key != "dtype" and not field.is_required()
}
"""Values of keys that recipes name only where these are others."""

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
    """Return what differs between two recipes of one kind.

    Args:
        old: recipe in the header of a file.
        new: recipe of today.
        model: whose recipe `new` is; the digests of its weights are followed by their path.
    """
    before, now, places = _values(old), _values(new), _places(model) if model else {}
    found = []
    for name in dict.fromkeys((*now, *before)):
        was, value = (text_of(x.get(name, _DEFAULTS.get(name, "absent"))) for x in (before, now))
        if was != value and (is_digest(was) or is_digest(value)):
            place = places.get(name, "") if name in now else ""
            found.append(Difference(f"{name}'s digest", short(was), short(value) + place))
        elif was != value:
            found.append(Difference(name, was, value))
    return found


def recipe_words(recipe: Mapping[str, object]) -> str:
    """Return a recipe as a line."""
    texts = {name: text_of(value) for name, value in _values(recipe).items() if name != "kind"}
    return ", ".join(f"{name} {short(text)}" for name, text in texts.items() if text != "none")


def program_of(recipe: Mapping[str, object]) -> str:
    """Return the name of the program that encodes by a recipe; "" where it is Latentmake."""
    return PROGRAMS.get(str(recipe.get("layout")), "a program") if "program" in recipe else ""


def _values(recipe: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of a recipe by name: `VAE`, `text encoder 2's tokenizer`, `dtype`."""
    found: dict[str, object] = {}
    for key, value in recipe.items():
        if key == "encoders":
            for number, encoder in enumerate(value):
                name = _name(f"text.{number}")
                for part, each in encoder.items():
                    found[name if part == "weights" else f"{name}'s {part}"] = each
        elif isinstance(value, dict):  # weights and options of other programs
            found |= {_name(each): value[each] for each in value}
        else:
            found[program_of(recipe) if key == "program" else _name(key)] = value
    return found


def _name(key: str) -> str:
    """Return the name of a part of a recipe, or of the weights that a key of a model names."""
    name, _, number = key.partition(".")
    return _NAMES.get(name, name) + (f" {int(number) + 1}" if int(number or 0) else "")


def _places(model: Model) -> dict[str, str]:
    """Return the path of each of a model's networks in brackets, by its name in a recipe."""
    # What encodes comes first there, and counts where a flag stands for what is trained, too.
    keys = {file.flag: file.key for file in reversed(model.files.values())}
    own = ("vae", "clip", *(f"text.{number}" for number in range(len(model.text))))
    keys |= {_name(key): key for key in (*own, *model.files)}
    weights = {name: model.weights(key) for name, key in keys.items()}
    return {name: f" ({each.path or each.hub})" for name, each in weights.items() if each}


# -- targets --------------------------------------------------------------------------------------


def recipe_changes(facts: Facts, runs: Collection[RunPlan]) -> Iterator[str]:
    """Yield a line for all targets of a model and kind that are stale by the same differences.

    The header of one cache file of each distinct recipe of a dataset is read.
    """
    alike: dict[tuple[str, str, str, str], list[tuple[Part, Stale]]] = defaultdict(list)
    for part, state in {part: state for run in runs for part, state in run.parts.items()}.items():
        for each in state.stale:
            if each.reason == "changed recipe":
                kind = parsed(part.name).kind
                alike[part.dataset, part.model, kind, each.recipe].append((part, each))
    counts: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (dataset, model, kind, _), targets in alike.items():
        counts[model, kind, _in_words(facts, *targets[0])][dataset] += len(targets)
    for (model, kind, words), datasets in counts.items():
        whose = f" ({model})" * (len(facts.config.models) > 1)
        number = sum(datasets.values())
        what = "texts" if kind == "text" and number > 1 else kind
        yield f"recipe: {words}: {number} {what} of {some(datasets)}{whose}"


def _in_words(facts: Facts, part: Part, stale: Stale) -> str:
    if not facts.recipe(part.dataset, part.model, parsed(part.name).kind):
        return f"unknown without the model {part.model}"
    found = differences(facts, part, stale)
    settings = some([str(each) for each in found if each.name != PLACED])
    return settings or (PLACED if found else "keys in headers")


def differences(facts: Facts, part: Part, stale: Stale) -> list[Difference]:
    """Return what differs between recipe and placement of a file and those of today."""
    now = facts.recipe(part.dataset, part.model, parsed(part.name).kind)
    metadata, model = read_metadata(stale.path), facts.config.models[part.model]
    # What a header says beside its recipe, such as its scale, is a part of the recipe too.
    recipe = {key: metadata[key] for key in now if key in metadata} | recipe_of(metadata)
    found = recipe_differences(recipe, now, model) if now else []
    judge = facts.judge(part.dataset, part.model, [part.name], [stale.item], [stale.path])
    with suppress(CacheError, SourceError, OSError, ValueError):
        found += placing_differences(judge, stale)
    return found


def placing_differences(judge: Judge, stale: Stale) -> list[Difference]:
    """Return how the placement of an image differs in a file; nothing where it is the same.

    The last one is the placement itself, after the settings that changed it. A file of an earlier
    release does not say its settings.
    """
    item, target, header, today = stale.item, stale.target, read_header(stale.path), judge.settings
    size = judge.contents.size(item, header.source, header)
    now = judge.view(item, target, header.source, header)
    if not (today and size and now) or _has_view(header, now):
        return []
    before = today.placed(json.loads(header.view or "{}"))
    was = view_of(judge.layout, before, item, target, size)
    if not _has_view(header, was):
        return [Difference(PLACED, "others", now)]
    changed = value_differences(before.model_dump(), today.model_dump())
    return [*changed, Difference(PLACED, was, now)]


def _has_view(header: Header, view: str) -> bool:
    return header.key == target_key(header.source, header.recipe, view)
