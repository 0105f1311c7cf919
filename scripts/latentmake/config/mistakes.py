"""Lines about mistakes in values of the configuration, with the key or word to write instead."""

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

from latentmake.config.fields import PATTERNS, held_by
from latentmake.config.machines import PROGRAMS
from latentmake.config.weights import fetching
from latentmake.errors import ConfigError, nearest, shortened

_QUOTES = "put it in quotes: YAML reads yes, no, on, 012, {a} and [a] as other values"


class Section(NamedTuple):
    """A section of the configuration."""

    pattern: tuple[str, ...]  # as pydantic reports it; `*` is a name or the index of a list
    model: type[BaseModel]

    @property
    def kind(self) -> str | None:
        """Kind of the trainer that it is a part of."""
        return self.pattern[3] if self.pattern[2:3] == ("trainer",) else None

    @property
    def trained(self) -> bool:
        """Whether it is about a training, and not about machines."""
        return self.pattern[:1] in ((), ("datasets",), ("models",), ("runs",))


def shown(location: Iterable[int | str]) -> str:
    """Return a location as the user wrote it: without the tag of a trainer's kind."""
    parts = [str(part) for part in location]
    if parts[0:1] == ["runs"] and parts[2:3] == ["trainer"] and len(parts) > 3:
        del parts[3]
    return ".".join(parts)


@cache
def sections(root: type[BaseModel]) -> tuple[Section, ...]:
    """Return all sections of a configuration, outer ones before those that they hold."""
    found = [Section((), root)]
    for pattern, model in found:  # which grows
        for key, field in model.model_fields.items():
            held = held_by(field.annotation)
            found += [Section((*pattern, key, *below), inner) for below, inner in held]
    return tuple(sorted(found, key=lambda section: len(section.pattern)))


Location = tuple[int | str, ...]

_UNBROKEN = re.compile(r"\S{200,}")  # a value that a rule repeats, and longer than most paths


@cache
def foreign_words() -> tuple[Mapping[str, list[str]], Mapping[str, str]]:
    """Return other programs' words, with the keys to write instead; and with what else to do."""
    rows = yaml.safe_load(Path(__file__).with_name("foreign_words.yaml").read_text("utf-8"))
    keys = {word: keys.split() for keys, words in rows["keys"].items() for word in words.split()}
    answers = {word: row["write"] for row in rows["answers"] for word in row["words"].split()}
    return keys, answers


def line_of(error: ErrorDetails, root: type[BaseModel]) -> str:
    """Return the line for one of pydantic's errors about values of a configuration."""
    location, context, kind = error["loc"], error.get("ctx") or {}, error["type"]
    where = shown(location).removesuffix(".[key]")
    if isinstance(context.get("error"), ConfigError):
        return str(context["error"])
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
                value = value.strip('"')  # of a date
            what = f"{shortened(value)} {what}"
    return str(ConfigError(what, where=where, hint=hint))


def _rule(error: ErrorDetails) -> tuple[str, str]:
    """Return the rule that a value breaks, and what to write."""
    context, kind = error.get("ctx") or {}, error["type"]
    if kind in ("string_type", "invalid_key"):
        return "is no text", _QUOTES
    if kind == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return "is not allowed here", f"use {PATTERNS[context['pattern']]}"
    what = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    what = _UNBROKEN.sub(lambda found: shortened(found[0]), what)
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
        return what, ""  # it contains a hint
    return what, "see config/README.md"


def _hint(root: type[BaseModel], location: Location) -> str:
    """Return what to write instead of an unknown key."""
    key, known = shortened(str(location[-1])), sections(root)
    named = {pattern[0] for pattern, _ in known if pattern[1:2] == ("*",)}
    pattern = tuple(
        "*" if isinstance(part, int) or (index == 1 and location[0] in named) else str(part)
        for index, part in enumerate(location[:-1])
    )
    here = next((each for each in known if each.pattern == pattern), None)
    if here is None:
        return "remove it"
    keys = here.model.model_fields
    word, (words, answers) = key.lower().replace("-", "_"), foreign_words()
    meant = words.get(word, [])
    own = [each for each in meant if each in keys]
    if here.trained and word in answers and not own:
        return answers[word]
    if own := own or difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.8):
        return f"did you mean `{own[0]}`?"
    others = [x for x in known if x is not here and (here.kind in (None, x.kind) or not x.kind)]
    others.sort(key=lambda each: each.pattern[: len(pattern)] != pattern)  # first those below it
    for trained, name in product((here.trained, not here.trained), dict.fromkeys((*meant, key))):
        likely = (each for each in others if each.trained is trained)
        if found := [each.pattern for each in likely if name in each.model.model_fields]:
            place = shown(found[0]).replace("*", "NAME") or "the top level"
            return f"`{key}` belongs to {place}" if name == key else f"write `{name}` in {place}"
    hint = f"known here: {', '.join(keys)}"
    if kinds := [each.kind for each in known if key in each.model.model_fields]:
        hint = f"`{key}` belongs to a trainer of kind {kinds[0]}; {hint}"
    if here.kind in PROGRAMS and "arguments" in keys:
        program = PROGRAMS[here.kind]
        return f"{hint}; further options of {program} go into `arguments: [--{key}, ...]`"
    guess = None if kinds else nearest(key, keys)
    return f"did you mean `{guess}`?" if guess else hint
