"""The results each key of the configuration shapes, declared where the key is defined.

A key says so once: by a `Shapes` in its field, by the `shapes` of its section, or by the field that
holds its section. Recipes and digests, the documentation and the tests of what a change rebuilds
read these declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

__all__ = [
    "GEOMETRY",
    "LATENTS",
    "MACHINE",
    "MANIFEST",
    "PICTURES",
    "PUBLICATION",
    "TEXT",
    "WEIGHTS",
    "Kind",
    "Shapes",
    "declared",
    "kinds_of",
    "section_of",
    "shaping",
]

Kind = Literal["latents", "text", "manifest", "weights", "pictures", "publication", "machine"]


class Shapes:
    """A declaration: the `json_schema_extra` of a field, or the `shapes` of a section.

    Args:
        kinds: the results whose bytes depend on the key; `machine` for a key that no result
            depends on.
        layouts: the only layouts that heed the key; by default all.
        indirect: whether the key counts through what it leads to (sizes and frames, which are in
            each target's own key; the content of files), and not by its value.
        when: another key of the section and those of its values for which this one counts.
    """

    def __init__(
        self,
        *kinds: Kind,
        layouts: tuple[str, ...] = (),
        indirect: bool = False,
        when: tuple[str, tuple[object, ...]] | None = None,
    ) -> None:
        self.kinds = kinds
        self.layouts = layouts
        self.indirect = indirect
        self.when = when

    def __call__(self, schema: JsonDict) -> None:
        """Write the declaration into the JSON schema, for editors and readers."""
        schema["shapes"] = list(self.kinds)

    def counts(self, section: BaseModel, layout: str | None) -> bool:
        """Tell whether the key has a say in a section as it stands.

        Args:
            section: the values.
            layout: of the model concerned; None where that does not matter.
        """
        if layout is not None and self.layouts and layout not in self.layouts:
            return False
        return self.when is None or getattr(section, self.when[0]) in self.when[1]


LATENTS = Shapes("latents")
GEOMETRY = Shapes("latents", indirect=True)
TEXT = Shapes("text")
MANIFEST = Shapes("manifest")
WEIGHTS = Shapes("weights")
PICTURES = Shapes("pictures")
PUBLICATION = Shapes("publication")
MACHINE = Shapes("machine")


def declared(section: type[BaseModel], key: str, inherited: Shapes | None = None) -> Shapes:
    """Return what a key declares.

    Args:
        section: the class that has the key.
        key: its name.
        inherited: the declaration of the field that holds the section.

    Raises:
        TypeError: nobody declares anything.
    """
    field = section.model_fields[key]
    found = field.json_schema_extra
    if not isinstance(found, Shapes):
        found = getattr(section, "shapes", None) or inherited
    if found is None:
        raise TypeError(f"{section.__name__}.{key} does not declare what it shapes")
    return found


def section_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: several where a key chooses among them."""
    pending: list[Any] = [field.annotation]
    found = []
    while pending:
        kind = pending.pop()
        pending += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and hasattr(kind, "first_set"):
            found.append(kind)
    return found


def kinds_of(root: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], type[BaseModel], Shapes]]:
    """Yield every key below a section: its path of keys, the class that has it, its declaration.

    A dictionary of named sections adds no part to the path. Keys that hold a section are not
    yielded, only what is in it.
    """
    pending: list[tuple[tuple[str, ...], type[BaseModel], Shapes | None]] = [((), root, None)]
    while pending:
        path, section, inherited = pending.pop()
        for key, field in section.model_fields.items():
            own = field.json_schema_extra
            below = section_of(field)
            if below:
                given = own if isinstance(own, Shapes) else inherited
                pending += [((*path, key), kind, given) for kind in below]
            else:
                yield (*path, key), section, declared(section, key, inherited)


def shaping(
    section: BaseModel, kind: Kind, layout: str | None = None, *, defaults: bool = True
) -> dict[str, object]:
    """Return the keys of a section whose values shape a result, with plain values.

    Keys of sections below it are left out, and those that count indirectly.

    Args:
        section: the values.
        kind: the result.
        layout: of the model concerned; None where that does not matter.
        defaults: whether keys that have their defaults are among them. Without them a release that
            adds a key changes no digest.
    """
    found = {}
    values = section.model_dump(mode="json", exclude_defaults=not defaults)
    for key, field in type(section).model_fields.items():
        if key not in values or section_of(field):
            continue
        shapes = declared(type(section), key)
        if kind in shapes.kinds and not shapes.indirect and shapes.counts(section, layout):
            found[key] = values[key]
    return found
