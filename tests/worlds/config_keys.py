"""Keys of the configuration with their declarations."""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.config.sections import sections
from latentmake.config.shapes import Shapes, declared, held_by
from pydantic import BaseModel


def keys_of(root: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], type[BaseModel], Shapes]]:
    """Yield every key: its path, the class that has it, its declaration.

    Keys that hold a section are not yielded, only those of the section.
    """
    for section in sections(root):
        for key, field in section.model.model_fields.items():
            if not any(held_by(field.annotation)):
                shapes = declared(section.model, key, section.shapes)
                yield (*section.path, key), section.model, shapes
