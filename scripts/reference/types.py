"""Types and defaults of keys in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from latentmake.config.fields import OneOrMore, Resolution, expanded, place
from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize
from pydantic.fields import FieldInfo

__all__ = ["alternatives", "default_words", "short", "type_words"]

_NAMES = {int: "integer", float: "number", str: "text", ByteSize: "size in bytes"}
_PATTERNS = {r"^\.": "file ending", "^[A-Z": "name", "^(#": "colour"}
_LARGEST = 10_000  # larger limits only catch typing errors, so they are not shown


def type_words(field: FieldInfo) -> str:
    """Return the type of a key: `integer from 1`, `path or list of paths`."""
    return alternatives(list(dict.fromkeys(_words(field.annotation, field.metadata))))


def default_words(field: FieldInfo, description: str) -> str:
    """Return the default of a key, from the schema, or a hint that the description gives it."""
    value = field.default
    if field.is_required():
        return "required"
    if "The default " in description:
        return "default: see below"
    if value in (None, "", [], {}) or isinstance(value, BaseModel):
        return "optional"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    if isinstance(value, list):
        return f"default `[{', '.join(map(str, value))}]`"
    return f"default `{short(value)}`"


def short(value: object) -> str:
    """Return a value as text; small numbers look like `1e-4`."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:g}" if value == 0 or value >= 0.001 else f"{value:.0e}".replace("e-0", "e-")


def alternatives(words: Sequence[str]) -> str:
    """Join words with commas and a final `or`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _words(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
    """Yield the types that a value may have."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    metadata = [
        inner
        for outer in metadata
        for inner in (outer.metadata if isinstance(outer, FieldInfo) else [outer])
    ]
    if origin is Annotated:
        yield from _words(arguments[0], (*arguments[1:], *metadata))
    elif annotation is bool:
        yield from ("`true`", "`false`")
    elif origin is Literal:
        yield from (f"`{value}`" for value in arguments)
    elif origin is list:
        members = list(dict.fromkeys(_words(arguments[0], ())))
        if any(isinstance(value, OneOrMore) for value in metadata):
            yield from (*members, "list of them")
        else:
            yield f"list of {_plural(alternatives(members))}"
    elif origin is dict and arguments[1] is Any:  # names of sections that stand elsewhere
        yield from ("text", "list of them")
    elif origin is dict:
        one = alternatives(list(_words(arguments[1], ())))
        yield "section of names" if one == "section" else f"map from text to {one}"
    elif arguments:
        for member in arguments:
            yield from _words(member, metadata)
    elif annotation is Resolution:
        yield "size"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        validators = (value for value in metadata if isinstance(value, BeforeValidator))
        takes_path = any(validator.func is place for validator in validators)
        yield from ("path", "section") if takes_path else ("section",)
    elif annotation is not type(None):
        yield _simple(annotation, metadata)


def _simple(annotation: type, metadata: Sequence[Any]) -> str:
    validators = (value for value in metadata if isinstance(value, AfterValidator))
    if any(validator.func is expanded for validator in validators):
        return "path"
    patterns = [str(value.pattern) for value in metadata if getattr(value, "pattern", None)]
    for beginning, name in _PATTERNS.items():
        if any(pattern.startswith(beginning) for pattern in patterns):
            return name
    return _NAMES[annotation] + (_limits(metadata) if annotation in (int, float) else "")


def _limits(metadata: Sequence[Any]) -> str:
    """Return the limits of a number; large ones are left out."""

    def limit(name: str) -> Any:
        return next((getattr(value, name) for value in metadata if hasattr(value, name)), None)

    least, above, most, below = map(limit, ("ge", "gt", "le", "lt"))
    words = f" from {least:g}" if least is not None else ""
    words = f" above {above:g}" if above is not None else words
    if most is not None and most <= _LARGEST:
        return f"{words} to {most:g}"
    return f"{words}, below {below:g}" if below is not None else words


def _plural(words: str) -> str:
    """Return the plural of a type."""
    name = words.partition(" from ")[0]
    return name if name.startswith("`") else f"{name.replace(' or ', 's or ')}s"
