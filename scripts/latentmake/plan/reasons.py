"""Reasons: what differs between something that was made and what is asked for today."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 8  # digits of a digest
_NAMED = 3  # differences, or datasets, of a line


class Difference(NamedTuple):
    """What something was made of, as it was then and as it is today.

    Without values, its name is a sentence that says what differs.
    """

    name: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}" if self.old != self.new else self.name


def is_digest(value: str) -> bool:
    """Tell whether a text is a whole SHA-256 digest."""
    return _SHA256.fullmatch(value) is not None


def short(value: str) -> str:
    """Return the beginning of a digest, and any other text as it is."""
    return f"{value[:_SHOWN]}.." if is_digest(value) else value


def some(names: Collection[object]) -> str:
    """Return the first of some names, and the number of the others."""
    others = len(names) - _NAMED
    return ", ".join([*map(str, names)][:_NAMED]) + f" and {others} more" * (others > 0)


def value_differences(
    old: Mapping[str, object], new: Mapping[str, object], name: str = "{}"
) -> list[Difference]:
    """Return the values that differ; `name` is the pattern of their names."""
    return [
        Difference(name.format(key), short(text_of(old.get(key))), short(text_of(new.get(key))))
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key)
    ]


def text_of(value: object) -> str:
    """Return a value of a recipe or of the configuration as text."""
    if isinstance(value, list):
        return " ".join(map(text_of, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
