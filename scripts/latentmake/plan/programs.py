"""Programs and weights that encoded, by the digests in recipes.

A recipe holds one digest of all sources of a program that encodes in place of our encoders, and one
of each network's weights. A small file for each such digest says which sources they were, or where
the weights lay, so that a plan can name what changed. They can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from latentmake.config import Model, TextWeights
from latentmake.errors import StorageError
from latentmake.files import atomic
from latentmake.models.files import tokenizer_folder
from latentmake.models.scripted import script_of

_FOLDER = Path(".latentmake/programs")
_DIGEST = re.compile(r"[0-9a-f]+")


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


def changed(before: Program, now: Program) -> list[str]:
    """Return the files that are not what they were, new ones and missing ones too."""
    names = before.files.keys() | now.files.keys()
    return sorted(name for name in names if before.files.get(name) != now.files.get(name))


def keep_places(recipe: Mapping[str, object], model: Model) -> None:
    """Keep where the weights of a recipe lie, for the time when they are no longer the model's."""
    values = recipe_values(recipe)
    for key, place in places_of(model, str(recipe.get("kind"))).items():
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


def places_of(model: Model, kind: str) -> dict[str, str]:
    """Return key, as `recipe_values` has it -> path of the weights, or their id on the hub."""
    if model.scripted:
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
