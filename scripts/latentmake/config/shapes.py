"""Declarations of the results that each key of the configuration shapes.

A key says so once: by a `Shapes` in its field, by the `shapes` of its section, or by the field that
holds its section. Recipes and digests, the documentation and tests read these declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.config import JsonDict

from latentmake.config.fields import Closed

Kind = Literal[
    "latents", "text", "manifest", "weights", "pictures", "clips", "publication", "machine"
]


class Shapes:
    """A declaration: the `json_schema_extra` of a field, or the `shapes` of a section.

    Args:
        kinds: the results whose bytes depend on the key; `machine` for a key that no result
            depends on.
        layouts: the only layouts on which the key has an effect; by default all.
        indirect: whether the key counts by its consequences (sizes and frames, which are in each
            target's own key; the content of files), and not by its value.
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
        """Whether the key has an effect in a section with these values; None is any layout."""
        if layout is not None and self.layouts and layout not in self.layouts:
            return False
        return self.when is None or getattr(section, self.when[0]) in self.when[1]


LATENTS = Shapes("latents")
GEOMETRY = Shapes("latents", indirect=True)
TEXT = Shapes("text")
MANIFEST = Shapes("manifest")
WEIGHTS = Shapes("weights")
PICTURES = Shapes("pictures")
CLIPS = Shapes("clips")
PUBLICATION = Shapes("publication")
MACHINE = Shapes("machine")


def declared(section: type[BaseModel], key: str, inherited: Shapes | None = None) -> Shapes:
    """Return a key's declaration; `inherited` is that of the field that holds the section."""
    field = section.model_fields[key]
    found = field.json_schema_extra
    if not isinstance(found, Shapes):
        found = getattr(section, "shapes", None) or inherited
    if found is None:
        raise TypeError(f"{section.__name__}.{key} has no declaration")
    return found


def held_by(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[Closed]]]:
    """Yield the sections that a field's type may hold, with their locations below the field.

    `*` stands for a name or the index of a list.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, Closed):
            yield (), annotation
    elif origin in (list, dict):
        yield from ((("*", *below), model) for below, model in held_by(arguments[-1]))
    elif origin is Annotated:
        yield from held_by(arguments[0])
    elif origin is not Literal:
        members = [
            each for each in arguments if isinstance(each, type) and issubclass(each, Closed)
        ]
        for each in arguments:
            # pydantic puts the tag of such a union's member into the location.
            tag = get_args(each.model_fields["kind"].annotation) if len(members) > 1 else ()
            yield from (((*tag, *below), model) for below, model in held_by(each))


def shaping(
    section: BaseModel, kind: Kind, layout: str | None = None, *, defaults: bool = True
) -> dict[str, object]:
    """Return the keys of a section that shape a result directly, with plain values.

    Keys of sections below it are left out. Without `defaults` a release that adds a key changes no
    digest.
    """
    found = {}
    values = section.model_dump(mode="json", exclude_defaults=not defaults)
    for key, field in type(section).model_fields.items():
        if key not in values or any(held_by(field.annotation)):
            continue
        shapes = declared(type(section), key)
        if kind in shapes.kinds and not shapes.indirect and shapes.counts(section, layout):
            found[key] = values[key]
    return found
