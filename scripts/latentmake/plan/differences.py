"""Differences of recipes and of the placement of images, in the words of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.errors import SourceError
from latentmake.files.cachefile import Header, target_key
from latentmake.geometry.clips import AnyClip
from latentmake.index.memo import Memo
from latentmake.layouts import Layout
from latentmake.models.files import tokenizer_folder
from latentmake.models.scripted import script_of
from latentmake.plan import programs
from latentmake.plan.keys import Keys, Source

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHOWN = 8  # digits of a digest
_ABSENT = "absent"
_NAMES = {"format": "format version", "vae": "VAE", "clip": "CLIP image encoder"}
_TRIED: dict[str, tuple[object, ...]] = {
    "fit": ("crop", "bucket"),
    "bucket_no_upscale": (False, True),
    "bucket_reso_steps": (None, 8, 16, 32, 64),
    "min_bucket_reso": (None, 64, 128, 192, 256, 320, 384, 512),
    "max_bucket_reso": (None, 512, 768, 1024, 1280, 1536, 2048),
    "no_resize_control": (False, True),
}
"""Keys of a dataset that place images, and the values that a file may have been made with."""


class Difference(NamedTuple):
    """A part of a key, as it was when a file was made and as it is today."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}"


def short(value: str) -> str:
    """Return the beginning of a digest, and any other text as it is."""
    return f"{value[:_SHOWN]}.." if _DIGEST.fullmatch(value) else value


# -- recipes --------------------------------------------------------------------------------------


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
    places = {} if model is None else _places(model, str(new.get("kind")))
    found = []
    for key in dict.fromkeys((*now, *before)):
        was, value = (_text(each.get(key, _default(key))) for each in (before, now))
        if was == value:
            continue
        if key == "program":
            found += _sources(was, value)
            continue
        name, old_place, place = _name(key), "", ""
        if _DIGEST.fullmatch(was) or _DIGEST.fullmatch(value):
            name += "'s digest"
            known = programs.program_of(was)
            old_place = f" ({known.name})" if known else ""
            place = f" ({places[key]})" if key in places and value != _ABSENT else ""
        found.append(Difference(name, short(was) + old_place, short(value) + place))
    return found


def recipe_words(recipe: Mapping[str, object]) -> str:
    """Return a recipe as a line, with the paths of weights as far as they are known."""
    words = []
    for key, value in recipe_values(recipe).items():
        text = _text(value)
        if key == "kind" or text == "none":
            continue
        known = programs.program_of(text)
        place = f" ({known.name})" if known else ""
        words.append(f"{_name(key)} {short(text)}{place}")
    return ", ".join(words)


def keep_places(recipe: Mapping[str, object], model: Model) -> None:
    """Keep where the weights of a recipe lie, for the time when they are no longer the model's."""
    values = recipe_values(recipe)
    for key, place in _places(model, str(recipe.get("kind"))).items():
        programs.keep(str(values.get(key, "")), place, {})


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


def _places(model: Model, kind: str) -> dict[str, str]:
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


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _sources(was: str, value: str) -> list[Difference]:
    """Return the source files of a program that differ; the program where they are not known."""
    old, new = programs.program_of(was), programs.program_of(value)
    name = next((each.name for each in (new, old) if each is not None), "the encoding program")
    if old is None or new is None or not (files := programs.changed(old, new)):
        return [Difference(f"{name}'s digest", short(was), short(value))]
    return [
        Difference(
            f"{name}'s {file}",
            *(short(each.files.get(file, _ABSENT)) for each in (old, new)),
        )
        for file in files
    ]


# -- placement ------------------------------------------------------------------------------------


def _named(changes: Sequence[dict[str, object]], settings: Dataset) -> list[Difference]:
    """Return the keys that one of several changes is of, with all of their values; often none.

    A file of the very resolution is taken for one of `fit: crop`, whatever else might give it.
    """
    first = {*changes[0]}
    if first != {"fit"} and any({*each} != first for each in changes):
        return []
    found = []
    for key in changes[0]:
        values = dict.fromkeys(_text(each[key]) for each in changes if {*each} == first)
        found.append(Difference(key, " or ".join(values), _text(getattr(settings, key))))
    return found


def placement_differences(
    memo: Memo,
    layout: Layout,
    settings: Dataset | None,
    part: str,
    source: Source,
    header: Header,
    clip: AnyClip | None = None,
) -> list[Difference]:
    """Return what differs in how an image is scaled and cut; nothing where it is the same.

    The last one is the placement itself, after the one or two settings that changed it, where only
    they can have: a key that was edited looks like a placement by settings that are not.

    A key holds the placement as part of a digest alone: so the settings that the file may have
    been made with are tried. A source of another size is no difference of the placement.

    Args:
        memo: knows sizes of images.
        layout: of the file.
        settings: the dataset's section of the configuration; None for prompts.
        part: of the file.
        source: of its item today.
        header: of the file.
        clip: frames of a video.
    """

    def variant(tried: Dataset | None) -> str | None:
        keys = Keys(memo, layout, tried, {})
        keys.prepare_sizes([header.source])
        try:
            return keys.variant(part, source, header.source, clip, header)
        except (SourceError, ValueError):  # such settings may have no bucket of this size
            return None

    def explains(found: str | None) -> bool:
        return found is not None and header.key == target_key(header.source, header.recipe, found)

    now = variant(settings)
    if explains(now) or settings is None or now == "":
        return []
    others = [
        {key: value}
        for key, values in _TRIED.items()
        for value in values
        if value != getattr(settings, key)
    ]
    pairs = [one | other for one, other in combinations(others, 2) if one.keys() != other.keys()]
    for changes in (others, pairs):
        tried = [(each, variant(settings.model_copy(update=each))) for each in changes]
        found = [(each, was) for each, was in tried if explains(was)]
        if found:
            keys = _named([each for each, _ in found], settings)
            return [*keys, Difference("size and crop", str(found[0][1]), str(now))]
    return [Difference("size and crop", "others", now or "unknown until the image is read")]
