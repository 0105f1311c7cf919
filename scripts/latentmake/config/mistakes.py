"""Messages about mistakes in the configuration, with the key or value to write instead."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from latentmake.base.errors import ConfigError, nearest, shortened
from latentmake.config.fields import PATTERNS, held_by
from latentmake.config.machines import PROGRAMS
from latentmake.config.weights import fetching

_QUOTES = "put it in quotes: YAML reads yes, no, on, 012, {a} and [a] as other values"


class Section(NamedTuple):
    """Section of the configuration.

    Attributes:
        pattern: location as pydantic reports it; `*` is a name or the index of a list.
        model: class of the section.
    """

    pattern: tuple[str, ...]
    model: type[BaseModel]

    @property
    def kind(self) -> str | None:
        """Kind of the trainer that the section belongs to; None for other sections."""
        return self.pattern[3] if self.pattern[2:3] == ("trainer",) else None

    @property
    def trained(self) -> bool:
        """Whether the section is about a training, not about machines."""
        return self.pattern[:1] in ((), ("datasets",), ("captioners",), ("models",), ("runs",))


def shown(location: Iterable[int | str]) -> str:
    """Return a location as the user wrote it, without the kind of the trainer."""
    parts = [str(part) for part in location]
    if parts[0:1] == ["runs"] and parts[2:3] == ["trainer"] and len(parts) > 3:
        del parts[3]
    return ".".join(parts)


@cache
def sections(root: type[BaseModel]) -> tuple[Section, ...]:
    """Return all sections of a configuration, outer ones before those that they hold."""
    result = [Section((), root)]
    for pattern, model in result:  # grows in the loop
        for key, field in model.model_fields.items():
            held = held_by(field.annotation)
            result += [Section((*pattern, key, *below), inner) for below, inner in held]
    return tuple(sorted(result, key=lambda section: len(section.pattern)))


Location = tuple[int | str, ...]

_UNBROKEN = re.compile(r"\S{200,}")  # a value in a message of pydantic, longer than most paths


@cache
def foreign_words() -> tuple[Mapping[str, list[str]], Mapping[str, str]]:
    """Return words of other programs: word -> keys to write instead, and word -> other advice."""
    rows = yaml.safe_load(Path(__file__).with_name("foreign_words.yaml").read_text("utf-8"))
    keys = {word: keys.split() for keys, words in rows["keys"].items() for word in words.split()}
    answers = {word: row["write"] for row in rows["answers"] for word in row["words"].split()}
    return keys, answers


def mistake_of(error: ErrorDetails, root: type[BaseModel]) -> ConfigError:
    """Return the mistake for an error of pydantic."""
    location, context, kind = error["loc"], error.get("ctx") or {}, error["type"]
    where = shown(location).removesuffix(".[key]")
    key = {"missing": "", "union_tag_not_found": ".kind", "missing_key": f".{context.get('key')}"}
    if kind in key:
        what, where, hint = "this key is missing", where + key[kind], "add it"
    elif kind == "extra_forbidden":
        what, hint = "unknown key", _hint(root, location)
    elif kind == "union_tag_invalid":
        what = f"there is no trainer {shortened(json.dumps(context.get('tag')))}"
        where, hint = f"{where}.kind", f"known: {context.get('expected_tags')}".replace("'", "")
    else:
        what, hint = _rule(error)
        if kind == "string_type" or not isinstance(error["input"], dict | BaseModel):
            value = json.dumps(error["input"], default=str, ensure_ascii=False)
            if not isinstance(error["input"], str):
                value = value.strip('"')  # JSON puts a date in quotes
            what = f"{shortened(value)} {what}"
    return ConfigError(what, where=where, hint=hint)


def _rule(error: ErrorDetails) -> tuple[str, str]:
    """Return the rule that a value breaks, and a hint."""
    context, kind = error.get("ctx") or {}, error["type"]
    if kind in ("string_type", "invalid_key"):
        return "is no text", _QUOTES
    if kind == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return "is not allowed here", f"use {PATTERNS[context['pattern']]}"
    what = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    what = _UNBROKEN.sub(lambda match: shortened(match[0]), what)
    if kind == "literal_error" and isinstance(error["input"], str):
        word = re.sub(r"\W+", "_", error["input"]).lower()
        if answer := foreign_words()[1].get(word):
            return "is not known here", answer
        if guess := nearest(word, re.findall(r"'([^']*)'", context["expected"])):
            return "is not known here", f"did you mean `{guess}`?"
    if kind == "model_type":
        hint = fetching(str(error["input"])) if context.get("class_name") == "Model" else ""
        return "should be a section with keys", hint or "see config/README.md"
    if kind in ("list_type", "tuple_type") and isinstance(error["input"], str):
        return what, f"write it as a list: [{shortened(error['input'])}]"
    for bound, word in (("ge", "or more"), ("le", "or less")):
        if bound in context:
            return what, f"use {context[bound]} {word}"
    if kind == "value_error" and ";" in what:
        return what, ""  # the text behind the semicolon is a hint
    return what, "see config/README.md"


def _hint(root: type[BaseModel], location: Location) -> str:
    """Return a hint for an unknown key, such as a similar key or the section it belongs to."""
    key, here = shortened(str(location[-1])), _section_at(root, location[:-1])
    if here is None:
        return "remove it"
    keys = here.model.model_fields
    word, (words, answers) = key.lower().replace("-", "_"), foreign_words()
    meant = words.get(word, [])
    own = [name for name in meant if name in keys]
    if here.trained and word in answers and not own:
        return answers[word]
    if own := own or difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.8):
        return f"did you mean `{own[0]}`?"
    if other := _other_section(root, here, key, meant):
        return other
    hint = f"known here: {', '.join(keys)}"
    kinds = [section.kind for section in sections(root) if key in section.model.model_fields]
    if kinds:
        hint = f"`{key}` belongs to a trainer of kind {kinds[0]}; {hint}"
    if here.kind in PROGRAMS and "arguments" in keys:
        program = PROGRAMS[here.kind]
        return f"{hint}; further options of {program} go into `arguments: [--{key}, ...]`"
    guess = None if kinds else nearest(key, keys)
    return f"did you mean `{guess}`?" if guess else hint


def _section_at(root: type[BaseModel], location: Location) -> Section | None:
    """Return the section at a location; None if there is none."""
    named = {section.pattern[0] for section in sections(root) if section.pattern[1:2] == ("*",)}
    pattern = tuple(
        "*" if isinstance(part, int) or (index == 1 and location[0] in named) else str(part)
        for index, part in enumerate(location)
    )
    return next((section for section in sections(root) if section.pattern == pattern), None)


def _other_section(
    root: type[BaseModel], here: Section, key: str, meant: Iterable[str]
) -> str | None:
    """Return a hint to write a key, or what it may have `meant`, in another section."""
    others = [
        section
        for section in sections(root)
        if section is not here and (here.kind in (None, section.kind) or not section.kind)
    ]
    # Sections below this one first.
    others.sort(key=lambda section: section.pattern[: len(here.pattern)] != here.pattern)
    for trained, name in product((here.trained, not here.trained), dict.fromkeys((*meant, key))):
        for section in others:
            if section.trained is trained and name in section.model.model_fields:
                place = shown(section.pattern).replace("*", "NAME") or "the top level"
                return (
                    f"`{key}` belongs to {place}" if name == key else f"write `{name}` in {place}"
                )
    return None
