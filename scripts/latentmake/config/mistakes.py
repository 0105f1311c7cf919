"""One line for each mistake in a configuration, with a hint: the intended key or value.

The tree of sections, read off the fields of their classes, tells which keys may stand where.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from latentmake.config.fields import PATTERNS, held_by
from latentmake.config.trainers import Kind
from latentmake.errors import ConfigError, nearest, shortened


class Section(NamedTuple):
    """A section of the configuration.

    Attributes:
        pattern: its location as pydantic reports it; `*` stands for a name or the index of a list.
    """

    pattern: tuple[str, ...]
    model: type[BaseModel]

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that may stand in it."""
        return tuple(self.model.model_fields)

    @property
    def kind(self) -> str | None:
        """Kind of the trainer that it is a part of."""
        return self.pattern[3] if self.pattern[2:3] == ("trainer",) else None

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
    return tuple(sorted(_walk(Section((), root)), key=lambda section: len(section.pattern)))


def _walk(section: Section) -> Iterator[Section]:
    yield section
    for key, field in section.model.model_fields.items():
        for below, model in held_by(field.annotation):
            yield from _walk(Section((*section.pattern, key, *below), model))


Location = tuple[int | str, ...]
Answer = str | Mapping[str, str]
_PROGRAMS = {"musubi": "musubi-tuner", "sdscripts": "sd-scripts"}
_UNBROKEN = re.compile(r"\S{200,}")  # a value that a rule repeats, and longer than most paths
_PLACE = re.compile(
    r"(?P<section>(?:datasets|models|runs)\.NAME(?:\.[a-z_]+)*)\.(?P<key>[a-z_]+.*)"
)


@cache
def answers() -> Mapping[str, Answer]:
    """Return what to write instead of other programs' words, for each kind where that differs."""
    import yaml  # which few processes need

    rows = yaml.safe_load(Path(__file__).with_name("foreign_words.yaml").read_text("utf-8"))
    return {word: row.get("write", row) for row in rows for word in row["words"].split()}


def line_of(error: ErrorDetails, root: type[BaseModel], values: Mapping[str, object]) -> str:
    """Return the line for one of pydantic's errors about values of a configuration."""
    location, context = error["loc"], error.get("ctx") or {}
    where = shown(location)[:1000]
    if isinstance(context.get("error"), ConfigError):
        return str(context["error"])
    if error["type"] == "extra_forbidden":
        return str(ConfigError("unknown key", where=where, hint=_hint(root, location, values)))
    if error["type"] == "union_tag_invalid":
        what = f"there is no trainer {shortened(json.dumps(context.get('tag')))}"
        known = f"known: {context.get('expected_tags')}".replace("'", "")
        return str(ConfigError(what, where=f"{where}.kind", hint=known))
    if error["type"] in ("missing", "union_tag_not_found"):
        key = where if error["type"] == "missing" else f"{where}.kind"
        return str(ConfigError("this key is missing", where=key, hint="add it"))
    if error["type"] == "missing_key":
        return str(ConfigError(error["msg"], where=f"{where}.{context['key']}", hint="add it"))
    what, hint = _rule(error)
    if not isinstance(error["input"], dict | BaseModel):
        value = json.dumps(error["input"], default=str, ensure_ascii=False)
        what = f"{shortened(value)} {what}"
    return str(ConfigError(what, where=where.removesuffix(".[key]"), hint=hint))


def _rule(error: ErrorDetails) -> tuple[str, str]:
    """Return the rule that a value breaks, and what to write."""
    context, kind = error.get("ctx") or {}, error["type"]
    if kind == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return "is not allowed here", f"use {PATTERNS[context['pattern']]}"
    what = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    what = _UNBROKEN.sub(lambda found: shortened(found[0]), what)
    if kind == "literal_error" and isinstance(error["input"], str):
        word = re.sub(r"\W+", "_", error["input"]).lower()
        if guess := nearest(word, re.findall(r"'([^']*)'", context["expected"])):
            return "is not known here", f"did you mean `{guess}`?"
    if kind in ("list_type", "tuple_type") and isinstance(error["input"], str):
        return what, f"write it as a list: [{shortened(error['input'])}]"
    for bound, word in (("ge", "or more"), ("le", "or less")):
        if bound in context:
            return what, f"use {context[bound]} {word}"
    if kind == "value_error" and ";" in what:
        return what, ""  # it contains a hint
    return what, "see config/README.md"


def _hint(root: type[BaseModel], location: Location, values: Mapping[str, object]) -> str:
    """Return what to write instead of an unknown key."""
    key, known = shortened(str(location[-1])), sections(root)
    pattern = _pattern(known, location[:-1])
    here = next((each for each in known if each.pattern == pattern), None)
    if here is None:
        return "remove it"
    aliases: Mapping[str, str] = getattr(here.model, "aliases", {})
    if own := aliases.get(key.lower().replace("-", "_")):
        return f"did you mean `{own}`?"
    kind = here.kind or _kind(location, values)
    about_machines = len(location) > 1 and location[0] not in ("datasets", "models", "runs")
    if not about_machines and (answer := _answer(key.lower().replace("-", "_"), here, kind)):
        return answer
    if likely := difflib.get_close_matches(key.lower(), here.keys, n=1, cutoff=0.8):
        return f"did you mean `{likely[0]}`?"
    others = [each for each in known if key in each.keys and each is not here]
    others.sort(key=lambda each: each.pattern[: len(here.pattern)] != here.pattern)  # its own first
    for other in others:
        if other.kind in (None, kind):
            return f"`{key}` belongs to {other.shown or 'the top level'}"
    keys = f"known here: {', '.join(here.keys)}"
    if others:
        return f"`{key}` belongs to a trainer of kind {others[0].kind}; {keys}"
    if here.kind in _PROGRAMS and "arguments" in here.keys:
        program = _PROGRAMS[here.kind]
        return f"{keys}; further options of {program} go into `arguments: [--{key}, ...]`"
    guess = nearest(key, here.keys)
    return f"did you mean `{guess}`?" if guess else keys


def _pattern(known: Iterable[Section], location: Location) -> tuple[str, ...]:
    """Return a location with `*` for names and indices."""
    named = {each.pattern[0] for each in known if each.pattern[1:2] == ("*",)}
    return tuple(
        "*" if isinstance(part, int) or (index == 1 and location[0] in named) else str(part)
        for index, part in enumerate(location)
    )


def _answer(word: str, here: Section, kind: str) -> str | None:
    """Return the hint for another program's word."""
    answer = answers().get(word)
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


def _kind(location: Location, values: Mapping[str, object]) -> str:
    """Return the kind of trainer of the first run that uses a section."""
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
        trainer, model = run.get("trainer"), models.get(str(run.get("model")), {})
        if trainer and isinstance(trainer, Mapping):
            kind = str(trainer.get("kind"))
            return kind if kind in get_args(Kind) else "sd"
        kind = "musubi" if model.get("task") else str(model.get("layout"))
        return kind if kind in _PROGRAMS else "sd"
    return "sd"


def _named(section: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(section, Mapping):
        return {}
    return {str(name): each for name, each in section.items() if isinstance(each, Mapping)}
