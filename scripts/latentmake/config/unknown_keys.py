"""Hints for unknown keys: the intended key, or the section it belongs to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from latentmake.config.fields import Closed
from latentmake.config.foreign_words import ANSWERS, TRAINER, Kind

__all__ = ["Section", "hint", "nearest", "sections", "shown"]

Location = tuple[int | str, ...]
_KINDS: dict[str, Kind] = {"sd": "sd", "musubi": "musubi", "sdscripts": "sdscripts"}
_OTHERS = {"musubi": "wan_train_network.py", "sdscripts": "sd-scripts"}
_PLACE = re.compile(
    r"(?P<section>(?:datasets|models|runs)\.NAME(?:\.[a-z_]+)*)\.(?P<key>[a-z_]+.*)"
)


class Section(NamedTuple):
    """A section of the configuration.

    Attributes:
        pattern: its location; `*` stands for a name or the index of a list.
        keys: what may stand in it.
        kind: of trainer, where it is a part of one.
    """

    pattern: tuple[str, ...]
    keys: tuple[str, ...]
    kind: Kind | None

    @property
    def shown(self) -> str:
        """Its location as a message names it: `runs.NAME.trainer`."""
        return shown(self.pattern).replace("*", "NAME")


def shown(location: Iterable[int | str]) -> str:
    """Return a location as the user wrote it: without the tag of a trainer's kind."""
    parts = [str(part) for part in location]
    if parts[0:1] == ["runs"] and parts[2:3] == ["trainer"] and len(parts) > 3:
        del parts[3]
    return ".".join(parts)


@cache
def sections(root: type[BaseModel]) -> tuple[Section, ...]:
    """Return all sections of a configuration, outer ones before those that they hold."""
    found = sorted(_walk((), root), key=lambda section: len(section.pattern))
    return tuple(found)


def _walk(pattern: tuple[str, ...], model: type[BaseModel]) -> Iterator[Section]:
    kind = _KINDS.get(pattern[3]) if pattern[2:3] == ("trainer",) and len(pattern) > 3 else None
    yield Section(pattern, tuple(model.model_fields), kind)
    for key, field in model.model_fields.items():
        for below, found in _models((key,), field.annotation):
            yield from _walk((*pattern, *below), found)


def _models(pattern: tuple[str, ...], annotation: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the sections that a field may hold, with their places below it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, Closed):
            yield pattern, annotation
    elif origin in (list, dict):
        yield from _models((*pattern, "*"), arguments[-1])
    elif origin is Annotated:
        yield from _models(pattern, arguments[0])
    elif origin is not Literal:
        members = [
            each for each in arguments if isinstance(each, type) and issubclass(each, Closed)
        ]
        for each in arguments:
            # pydantic puts the tag of such a union's member into the location.
            tag = get_args(each.model_fields["kind"].annotation) if len(members) > 1 else ()
            yield from _models((*pattern, *tag), each)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, or None where none is."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def hint(root: type[BaseModel], location: Location, values: Mapping[str, object]) -> str:
    """Return what to write in place of an unknown key.

    Args:
        root: model of the whole configuration.
        location: of the key, as pydantic gives it.
        values: the configuration as read.
    """
    key, known = str(location[-1]), sections(root)
    pattern = _pattern(known, location[:-1])
    here = next((each for each in known if each.pattern == pattern), None)
    if here is None:
        return "remove it"
    kind = here.kind or _kind(location, values)
    about_machines = len(location) > 1 and location[0] not in ("datasets", "models", "runs")
    if not about_machines and (answer := _answer(key.lower().replace("-", "_"), here, kind)):
        return answer
    if likely := difflib.get_close_matches(key.lower(), here.keys, n=1, cutoff=0.8):
        return f"did you mean `{likely[0]}`?"
    others = [each for each in known if key in each.keys and each is not here]
    for other in others:
        if other.kind in (None, kind):
            return f"`{key}` belongs to {other.shown or 'the top level'}"
    if others:
        keys = ", ".join(here.keys)
        return f"`{key}` belongs to a trainer of kind {others[0].kind}; known here: {keys}"
    if here.kind in _OTHERS and here.shown == TRAINER:
        return (
            f"known here: {', '.join(here.keys)}; further options of {_OTHERS[here.kind]} go into "
            f"`arguments: [--{key}, ...]`"
        )
    if guess := nearest(key, here.keys):
        return f"did you mean `{guess}`?"
    return f"known here: {', '.join(here.keys)}"


def _pattern(known: Iterable[Section], location: Location) -> tuple[str, ...]:
    """Return a location with `*` for names and indices."""
    named = {each.pattern[0] for each in known if each.pattern[1:2] == ("*",)}
    return tuple(
        "*" if isinstance(part, int) or (index == 1 and location[0] in named) else str(part)
        for index, part in enumerate(location)
    )


def _answer(word: str, here: Section, kind: Kind) -> str | None:
    """Return what the table of other programs' words says of one."""
    answer = ANSWERS.get(word)
    if answer is None:
        return None
    text = answer if isinstance(answer, str) else answer[kind]
    place = _PLACE.fullmatch(text)
    if place is None:
        return text
    if place["section"] != here.shown and place["key"] not in here.keys:
        if place["key"] == word:
            return f"`{word}` belongs to {place['section']}"
        return f"write `{place['key']}` in {place['section']}"
    return f"write `{place['key']}`" if ":" in place["key"] else f"did you mean `{place['key']}`?"


def _kind(location: Location, values: Mapping[str, object]) -> Kind:
    """Return the kind of trainer that a section is about: that of the runs that use it."""
    section, name = (*location, "", "")[:2]
    runs, models = (_named(values.get(key)) for key in ("runs", "models"))
    if section == "runs" and name in runs:
        runs = {str(name): runs[str(name)]}
    for run in runs.values():
        listed = run.get("datasets")
        uses = {
            "datasets": listed if isinstance(listed, list) else [listed],
            "models": [run.get("model")],
        }
        if section in uses and name not in uses[str(section)]:
            continue
        if (trainer := run.get("trainer")) and isinstance(trainer, Mapping):
            return _KINDS.get(str(trainer.get("kind")), "sd")
        model = models.get(str(run.get("model")), {})
        return "musubi" if model.get("task") else _KINDS.get(str(model.get("layout")), "sd")
    return "sd"


def _named(section: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(section, Mapping):
        return {}
    return {str(name): each for name, each in section.items() if isinstance(each, Mapping)}
