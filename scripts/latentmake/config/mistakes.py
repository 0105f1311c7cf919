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
from typing import NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from latentmake.config.fields import PATTERNS, held_by
from latentmake.config.machines import PROGRAMS
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
    def trained(self) -> bool:
        """Whether it is about a training, and not about machines."""
        return self.pattern[:1] in ((), ("datasets",), ("models",), ("runs",))

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
_UNBROKEN = re.compile(r"\S{200,}")  # a value that a rule repeats, and longer than most paths


@cache
def foreign_words() -> tuple[Mapping[str, list[str]], Mapping[str, str]]:
    """Return other programs' words, with the keys to write instead; and with what else to do."""
    import yaml  # which few processes need

    rows = yaml.safe_load(Path(__file__).with_name("foreign_words.yaml").read_text("utf-8"))
    keys = {word: keys.split() for keys, words in rows["keys"].items() for word in words.split()}
    answers = {word: row["write"] for row in rows["answers"] for word in row["words"].split()}
    return keys, answers


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
    kind = here.kind or _kind(values)
    word, (keys, answers) = key.lower().replace("-", "_"), foreign_words()
    if own := [each for each in keys.get(word, ()) if each in here.keys]:
        return f"did you mean `{own[0]}`?"
    if here.trained and word in answers:
        return answers[word]
    if likely := difflib.get_close_matches(key.lower(), here.keys, n=1, cutoff=0.8):
        return f"did you mean `{likely[0]}`?"
    # Sections like this one first, and of those the ones below it.
    others = [each for each in known if each is not here and each.kind in (None, kind)]
    others.sort(key=lambda each: each.pattern[: len(here.pattern)] != here.pattern)
    for trained in (here.trained, not here.trained):
        for meant in dict.fromkeys((*keys.get(word, ()), key)):
            for other in others:
                if other.trained is trained and meant in other.keys:
                    place = other.shown or "the top level"
                    belongs = f"`{key}` belongs to" if meant == key else f"write `{meant}` in"
                    return f"{belongs} {place}"
    hint = f"known here: {', '.join(here.keys)}"
    if kinds := [each.kind for each in known if key in each.keys and each is not here]:
        hint = f"`{key}` belongs to a trainer of kind {kinds[0]}; {hint}"
    if here.kind in PROGRAMS and "arguments" in here.keys:
        program = PROGRAMS[here.kind]
        return f"{hint}; further options of {program} go into `arguments: [--{key}, ...]`"
    guess = None if kinds else nearest(key, here.keys)
    return f"did you mean `{guess}`?" if guess else hint


def _pattern(known: Iterable[Section], location: Location) -> tuple[str, ...]:
    """Return a location with `*` for names and indices."""
    named = {each.pattern[0] for each in known if each.pattern[1:2] == ("*",)}
    return tuple(
        "*" if isinstance(part, int) or (index == 1 and location[0] in named) else str(part)
        for index, part in enumerate(location)
    )


def _kind(values: Mapping[str, object]) -> str:
    """Return the kind of the first trainer of a configuration."""
    runs = values.get("runs")
    for run in runs.values() if isinstance(runs, Mapping) else ():
        trainer = run.get("trainer") if isinstance(run, Mapping) else None
        if isinstance(trainer, Mapping) and trainer.get("kind") in get_args(Kind):
            return str(trainer["kind"])
    return "sd"
