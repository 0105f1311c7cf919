"""Keys of the configuration with their declarations."""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.config.fields import Shapes, held_by
from pydantic import BaseModel
from reference.schema import declared


def keys_of(
    section: type[BaseModel], path: tuple[str, ...] = (), inherited: Shapes | None = None
) -> Iterator[tuple[tuple[str, ...], type[BaseModel], Shapes]]:
    """Yield every key: its path without names and indices, the class that has it, its declaration.

    Keys that hold a section are not yielded, only those of the section.
    """
    for key, field in section.model_fields.items():
        below = [model for _, model in held_by(field.annotation)]
        if not below:
            yield (*path, key), section, declared(section, key, inherited)
        own = field.json_schema_extra
        for model in below:
            yield from keys_of(model, (*path, key), own if isinstance(own, Shapes) else inherited)
