"""Products of a build besides cache files: what they are made of, and why they are made again.

A product has named parts: digests or values of everything that shapes it. A record of these parts
lies beside the product's files. `judge` compares product and record, and nothing else decides
whether a product is made again. (Cache files have their parts in their headers, see `plan.judge`.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, JsonValue, model_validator

from latentmake.base import atomic
from latentmake.base.state_file import JsonFile

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 8  # digits of a digest in a message
_NAMED = 3  # most names in one line

Parts = dict[str, JsonValue]
"""Name of a part in the user's words -> digest or value."""


class Product(NamedTuple):
    """Something that a build makes from named parts.

    Attributes:
        absent: why the product is made if there is no record of it, as a sentence.
        parts: digests or values of everything that shapes the product, by name.
        values: part -> names and values that its digest covers. They explain a difference of the
            digest, and do not decide anything.
        places: part -> path of what has its digest, for messages.
        files: paths of the product's files.
    """

    absent: str
    parts: Parts
    values: Mapping[str, Mapping[str, str]] = {}
    places: Mapping[str, str] = {}
    files: Sequence[Path] = ()


class Made(JsonFile, extra="ignore"):  # earlier releases write more
    """Record of what a product was made of. The attributes are those of a `Product`.

    Records of single products have further keys.
    """

    parts: Parts
    values: dict[str, dict[str, str]] = Field({})
    places: dict[str, str] = Field({})

    @classmethod
    def of(cls, product: Product, **more: Any) -> Self:
        """Return the record of a product, with the further keys of its kind."""
        return cls(parts=product.parts, values=product.values, places=product.places, **more)

    def write(self, path: Path) -> None:
        """Write the record without keys that have their defaults; raises StorageError."""
        fields = type(self).model_fields.items()
        given = {name for name, field in fields if getattr(self, name) != field.get_default()}
        atomic.write(path, (self.model_dump_json(indent=2, include=given) + "\n").encode())

    @property
    def product(self) -> Product:
        """The product as it was made, to compare it with an earlier one."""
        return Product("", self.parts, self.values, self.places)

    @model_validator(mode="before")
    @classmethod
    def _earlier(cls, content: Any) -> Any:
        if not isinstance(content, dict) or "parts" in content:
            return content
        from latentmake.plan.earlier import with_parts

        return with_parts(content)


def judge(product: Product, made: Made | None) -> list[Difference]:
    """Return why a product must be made again, or nothing if it is up to date.

    Args:
        product: the product as it should be.
        made: record of the product as it was made; None if there is none.
    """
    if made is None:
        return [Difference(product.absent)]
    differences: list[Difference] = []
    for name in dict.fromkeys((*product.parts, *made.parts)):
        if made.parts.get(name) == product.parts.get(name):
            continue
        told: list[Difference] = []
        if name in made.values and name in product.values:
            told = value_differences(made.values[name], product.values[name])
        differences += told or [Difference(name, _shown(made, name), _shown(product, name))]
    if differences:
        return differences
    return [Difference(f"{path} is missing") for path in product.files if not path.is_file()]


def _shown(product: Product | Made, name: str) -> str:
    """Return a part of a product as text, with its place."""
    value, place = short(text_of(product.parts.get(name))), product.places.get(name)
    return f"{value} ({place})" if place else value


class Difference(NamedTuple):
    """One difference between the past and the present: name, old value, new value.

    Without values, the name is a sentence that says what differs.
    """

    name: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}" if self.old != self.new else self.name


def is_digest(value: str) -> bool:
    """Return whether a text is a complete SHA-256 digest."""
    return _SHA256.fullmatch(value) is not None


def short(value: str) -> str:
    """Return the first digits of a digest; return any other text unchanged."""
    return f"{value[:_SHOWN]}.." if is_digest(value) else value


def some(names: Collection[object]) -> str:
    """Return the first names as text, and the number of the others."""
    others = len(names) - _NAMED
    listed = ", ".join([*map(str, names)][:_NAMED])
    return f"{listed} and {others} more" if others > 0 else listed


def value_differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[Difference]:
    """Return a Difference for each key whose values differ."""
    return [
        Difference(key, short(text_of(old.get(key))), short(text_of(new.get(key))))
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
