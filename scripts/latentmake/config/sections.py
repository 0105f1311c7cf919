"""The tree of configuration sections, read off the fields of their classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from pydantic import BaseModel

from latentmake.config.shapes import held_by


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
