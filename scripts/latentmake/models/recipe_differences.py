"""Differences of recipes, in the words of the configuration.

A recipe holds one digest of the sources of a program that encodes in place of our encoders, and one
of each network's weights. A small file for each such digest says which sources they were, or where
the weights lay, so that a plan can name them. These files can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.errors import StorageError
from latentmake.files import atomic
from latentmake.models.files import tokenizer_folder
from latentmake.models.reasons import Difference, is_digest, short, text_of

_FOLDER = Path(".latentmake/programs")
_DIGEST = re.compile(r"[0-9a-f]+")
_ABSENT = "absent"
_NAMES = {"format": "format version", "vae": "VAE", "clip": "CLIP image encoder"}


class Program(NamedTuple):
    """Sources of a program, or weights.

    Attributes:
        name: of the program; of weights their path.
        files: none of weights; path below its folder -> digest of the content.
    """

    name: str
    files: Mapping[str, str]


def keep(digest: str, name: str, files: Mapping[str, str]) -> None:
    """Keep what a digest stands for, unless it is kept already."""
    path = _FOLDER / f"{digest}.json"
    if _DIGEST.fullmatch(digest) and not path.exists():
        data = json.dumps({"name": name, "files": dict(files)}, indent=1, sort_keys=True)
        with contextlib.suppress(OSError, StorageError):  # a plan goes on without
            atomic.write(path, data.encode())


def program_of(digest: str) -> Program | None:
    """Return the sources that a digest stands for; None where they were not kept."""
    if not _DIGEST.fullmatch(digest):  # it stands in the header of some file
        return None
    try:
        found = json.loads((_FOLDER / f"{digest}.json").read_bytes())
        return Program(str(found["name"]), dict(found["files"]))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _changed(before: Program, now: Program) -> list[str]:
    """Return the files that are not what they were, new ones and missing ones too."""
    names = before.files.keys() | now.files.keys()
    return sorted(name for name in names if before.files.get(name) != now.files.get(name))


def keep_places(recipe: Mapping[str, object], model: Model) -> None:
    """Keep where the weights of a recipe lie, for the time when they are no longer the model's."""
    values = recipe_values(recipe)
    for key, place in _places_of(model, str(recipe.get("kind"))).items():
        keep(str(values.get(key, "")), place, {})


def recipe_values(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return key -> value of all parts of a recipe: `vae`, `text.1`, `text.1 tokenizer`, `dtype`.

    Weights bear the names of `Model.weights` where there are encoders of ours or of sd-scripts,
    else those of the flags of musubi-tuner's scripts.
    """
    return dict(_values(recipe))


def _values(recipe: Mapping[str, object]) -> Iterator[tuple[str, object]]:
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


def _places_of(model: Model, kind: str) -> dict[str, str]:
    """Return key, as `recipe_values` has it -> path of the weights, or their id on the hub."""
    if model.scripted:
        from latentmake.models.scripted import script_of

        keys = {file.flag: file.key for file in script_of(model, kind).files}
    else:
        keys = {key: key for key in ("vae", "clip", *_encoders(model, kind))}
    weights = {key: model.weights(name) for key, name in keys.items()}
    found = {key: each.path or each.hub or "" for key, each in weights.items() if each}
    for name, text in _encoders(model, kind).items():
        own = text.tokenizer or text
        found[f"{name} tokenizer"] = own.hub or str(tokenizer_folder(text))
        found[f"{name} projection"] = text.projection or ""
    return {key: place for key, place in found.items() if place}


def _encoders(model: Model, kind: str) -> dict[str, TextWeights]:
    named = enumerate(model.text if kind == "text" else ())
    return {f"text.{number}" if number else "text": each for number, each in named}


def recipe_differences(
    old: Mapping[str, object], new: Mapping[str, object], model: Model | None = None
) -> list[Difference]:
    """Return what differs between two recipes of one kind.

    Args:
        old: recipe in the header of a file.
        new: recipe of today.
        model: whose recipe `new` is; digests of weights are then followed by their path, the old
            one by where these weights once lay.
    """
    before, now = recipe_values(old), recipe_values(new)
    places = {} if model is None else _places_of(model, str(new.get("kind")))
    found = []
    for key in dict.fromkeys((*now, *before)):
        was, value = (text_of(each.get(key, _default(key))) for each in (before, now))
        if was == value:
            continue
        if key == "program":
            found += _sources(was, value)
            continue
        name, old_place, place = _name(key), "", ""
        if is_digest(was) or is_digest(value):
            name += "'s digest"
            known = program_of(was)
            old_place = f" ({known.name})" if known else ""
            place = f" ({places[key]})" if key in places and value != _ABSENT else ""
        found.append(Difference(name, short(was) + old_place, short(value) + place))
    return found


def recipe_words(recipe: Mapping[str, object]) -> str:
    """Return a recipe as a line, with the paths of weights as far as they are known."""
    words = []
    for key, value in recipe_values(recipe).items():
        text = text_of(value)
        if key == "kind" or text == "none":
            continue
        known = program_of(text)
        place = f" ({known.name})" if known else ""
        words.append(f"{_name(key)} {short(text)}{place}")
    return ", ".join(words)


def _name(key: str) -> str:
    """Return the name of a part of a recipe for messages."""
    encoder, _, part = key.partition(" ")
    if re.fullmatch(r"text(\.\d+)?", encoder):
        number = encoder.partition(".")[2]
        whose = f"text encoder {int(number) + 1}" if number else "text encoder"
        return f"{whose}'s {part}" if part else whose
    return _NAMES.get(key, key)


def _default(key: str) -> object:
    """Return the value of a key that recipes name only where it is another."""
    for section in (Dataset, Model):
        field = section.model_fields.get(key)
        if field is not None and key != "dtype" and not field.is_required():
            return field.get_default(call_default_factory=True)
    return _ABSENT


def _sources(was: str, value: str) -> list[Difference]:
    """Return the source files of a program that differ; the program where they are not known."""
    old, new = program_of(was), program_of(value)
    name = next((each.name for each in (new, old) if each is not None), "the encoding program")
    if old is None or new is None or not (files := _changed(old, new)):
        return [Difference(f"{name}'s digest", short(was), short(value))]
    return [
        Difference(
            f"{name}'s {file}",
            *(short(each.files.get(file, _ABSENT)) for each in (old, new)),
        )
        for file in files
    ]
