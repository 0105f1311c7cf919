"""What differs in the recipes and placements of cache files, in the configuration's words."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from latentmake.config.datasets import Dataset
from latentmake.config.machines import PROGRAMS
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.errors import CacheError, ModelError, SourceError
from latentmake.files.cachefile import read_header, read_metadata, recipe_of, target_key
from latentmake.layouts.layout import parsed
from latentmake.models.files import script_of, tokenizer_files
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Part, view_of
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference, Judge, Stale, is_digest, short, some, text_of

_ABSENT = "absent"
_NAMES = {"format": "format version", "vae": "VAE", "clip": "CLIP image encoder"}


def recipe_differences(
    old: Mapping[str, object], new: Mapping[str, object], model: Model | None = None
) -> list[Difference]:
    """Return what differs between two recipes of one kind.

    Args:
        old: recipe in the header of a file.
        new: recipe of today.
        model: whose recipe `new` is; the digests of its weights are followed by their path.
    """
    before, now = dict(_values(old)), dict(_values(new))
    found = []
    for key in dict.fromkeys((*now, *before)):
        was, value = (text_of(each.get(key, _default(key))) for each in (before, now))
        if was == value:
            continue
        name, place = _name(key, new), ""
        if is_digest(was) or is_digest(value):
            name += "'s digest"
            place = "" if model is None or value == _ABSENT else _place(model, key, new)
        found.append(Difference(name, short(was), short(value) + place))
    return found


def recipe_words(recipe: Mapping[str, object]) -> str:
    """Return a recipe as a line."""
    texts = {key: text_of(value) for key, value in _values(recipe) if key != "kind"}
    named = (f"{_name(key, recipe)} {short(x)}" for key, x in texts.items() if x != "none")
    return ", ".join(named)


def program_of(recipe: Mapping[str, object]) -> str:
    """Return the name of the program that encodes by a recipe; "" where it is Latentmake."""
    return PROGRAMS.get(str(recipe.get("layout")), "a program") if "program" in recipe else ""


def _values(recipe: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield key and value of all parts of a recipe: `vae`, `text.1`, `text.1 tokenizer`, `dtype`.

    Weights bear the names of `Model.weights` where there are encoders of ours or of sd-scripts,
    else those of the flags of musubi-tuner's scripts.
    """
    for key, value in recipe.items():
        if key == "weights":
            yield from value.items() if isinstance(value, dict) else [("vae", value)]
        elif key == "options" and isinstance(value, dict):
            yield from value.items()
        elif key == "encoders" and isinstance(value, list):
            for number, encoder in enumerate(value):
                name = f"text.{number}" if number else "text"
                for part, each in encoder.items() if isinstance(encoder, dict) else ():
                    yield name if part == "weights" else f"{name} {part}", each
        else:
            yield key, value


def _place(model: Model, key: str, recipe: Mapping[str, object]) -> str:
    """Return the path of weights that a part of a recipe stands for, in brackets; "" if unknown."""
    name, _, part = key.partition(" ")
    if name.startswith("--") and model.spec.scripts is not None:
        files = script_of(model, str(recipe.get("kind"))).files
        name = next((file.key for file in files if file.flag == name), "")
    if name.partition(".")[0] not in ("vae", "clip", "image_encoder", "dit", "text"):
        return ""
    weights = model.weights(name)
    place = weights and (weights.path or weights.hub)
    if isinstance(weights, TextWeights) and part == "projection":
        place = weights.projection
    elif isinstance(weights, TextWeights) and part == "tokenizer":
        hub = (weights.tokenizer or weights).hub
        with suppress(ModelError):
            place = hub or str(tokenizer_files(weights)[0].parent)
    return f" ({place})" if place else ""


def _name(key: str, recipe: Mapping[str, object]) -> str:
    """Return the name of a part of a recipe for messages."""
    encoder, _, part = key.partition(" ")
    if re.fullmatch(r"text(\.\d+)?", encoder):
        number = encoder.partition(".")[2]
        whose = f"text encoder {int(number) + 1}" if number else "text encoder"
        return f"{whose}'s {part}" if part else whose
    if key == "program":
        return program_of(recipe) or "the encoding program"
    return _NAMES.get(key, key)


def _default(key: str) -> object:
    """Return the value of a key that recipes name only where it is another."""
    for section in (Dataset, Model):
        field = section.model_fields.get(key)
        if field is not None and key != "dtype" and not field.is_required():
            return field.get_default(call_default_factory=True)
    return _ABSENT


PLACED = "size and crop"
"""Name of the difference between two placements of an image."""


def recipe_changes(facts: Facts, runs: Collection[RunPlan]) -> Iterator[str]:
    """Yield a line for all targets of a model and kind that are stale by the same differences.

    The header of one cache file of each distinct recipe of a dataset is read.
    """
    first: dict[tuple[str, str, str, str], tuple[Part, Stale]] = {}
    numbers: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for part, state in {part: state for run in runs for part, state in run.parts.items()}.items():
        kind = parsed(part.name).kind
        for each in state.stale:
            if each.reason == "changed recipe":
                group = part.dataset, part.model, kind, each.recipe
                first.setdefault(group, (part, each))
                numbers[group] += 1
    counts: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for group, (part, stale) in first.items():
        dataset, model, kind, _ = group
        counts[model, kind, f"recipe: {_difference(facts, part, stale)}"][dataset] += numbers[group]
    for (model, kind, words), datasets in counts.items():
        whose = f" ({model})" * (len(facts.config.models) > 1)
        targets = f"text{'s' * (sum(datasets.values()) > 1)}" if kind == "text" else kind
        yield f"{words}: {sum(datasets.values())} {targets} of {some(datasets)}{whose}"


def _difference(facts: Facts, part: Part, stale: Stale) -> str:
    if not facts.recipe(part.dataset, part.model, parsed(part.name).kind):
        return f"unknown without the model {part.model}"
    found = differences(facts, None, part, stale)
    settings = some([str(each) for each in found if each.name != PLACED])
    return settings or (PLACED if found else "keys in headers")


def differences(facts: Facts, judge: Judge | None, part: Part, stale: Stale) -> list[Difference]:
    """Return what differs between recipe and placement of a file and those of today.

    Args:
        facts: of the model.
        judge: of the target; asked for where it is None.
        part: of the target.
        stale: a target with a file of another key.
    """
    now = facts.recipe(part.dataset, part.model, parsed(part.name).kind)
    found = []
    if now:
        model = facts.config.models[part.model]
        found = recipe_differences(recipe_of(read_metadata(stale.path)), now, model)
    of_one = part.dataset, part.model, [part.name], [stale.item], [stale.path]
    judge = judge or facts.judge(*of_one)
    with suppress(CacheError, OSError):
        found += _placing_differences(judge, stale)
    return found


def _placing_differences(judge: Judge, stale: Stale) -> list[Difference]:
    """Return how the placement of an image differs in a file; nothing where it is the same.

    The last one is the placement itself, after the settings that changed it. A file of an earlier
    release does not say its settings.
    """
    header, today = read_header(stale.path), judge.settings
    item, target, content = stale.item, stale.target, header.source
    now, size = (
        judge.view(item, target, content, header),
        judge.contents.size(item, content, header),
    )
    if today is None or not now or target_key(content, header.recipe, now) == header.key:
        return []
    with suppress(ValueError, SourceError):
        before = today.placed(json.loads(header.view or "{}"))
        was = size and view_of(judge.layout, before, item, target, size)
        if was is not None and target_key(content, header.recipe, was) == header.key:
            changed = [
                Difference(key, text_of(getattr(before, key)), text_of(getattr(today, key)))
                for key in dict.fromkeys((*before.placing(), *today.placing()))
                if getattr(before, key) != getattr(today, key)
            ]
            return [*changed, Difference(PLACED, was, now)]
    return [Difference(PLACED, "others", now)]
