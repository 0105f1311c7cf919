"""Dataset files of other trainers: read TOML or JSON, check the types of values.

Nothing in such a file is executed. A mistake is one line with the place of the key.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from latentmake.errors import ConfigError

__all__ = ["Keys", "Note", "Resolution", "checked", "general_of", "read", "tables"]

_LARGEST = 10_000_000  # bytes: more is no file that somebody wrote


class Note(NamedTuple):
    """Note about a setting that an import changes or leaves out.

    Attributes:
        key: its place in the file: `datasets[0].resize_interpolation`.
        what: why, or what was made of it.
        hint: what to do.
    """

    key: str
    what: str
    hint: str

    @property
    def line(self) -> str:
        """The note as one line."""
        return " ".join(f"{self.key}: {self.what}; {self.hint}".split())


def _sides(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, list) and len(value) == 2:
        return tuple(value)
    raise ValueError("should be a number, or a width and a height such as [960, 544]")


Resolution = Annotated[tuple[int, int], BeforeValidator(_sides)]
"""Width and height, in pixels; one number is a square."""


class Keys(BaseModel, extra="forbid", strict=True, frozen=True):
    """Keys of a table; others are refused, numbers are not text."""


_Keys = TypeVar("_Keys", bound=Keys)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a dataset file.

    Raises:
        ConfigError: it cannot be read, or is no TOML or JSON.
    """
    where, kind = str(path), path.suffix.lower()
    if kind not in (".toml", ".json"):
        hint = "name musubi-tuner's or sd-scripts' dataset file"
        raise ConfigError("is neither a .toml nor a .json file", where=where, hint=hint)
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise ConfigError(what, where=where, hint="correct dataset_toml=PATH")
        if path.stat().st_size > _LARGEST:
            what = f"has more than {_LARGEST} bytes"
            raise ConfigError(what, where=where, hint="name a dataset file")
        data = path.read_bytes()
    except OSError as error:
        hint = "check its permissions"
        raise ConfigError(f"cannot be read ({error.strerror})", where=where, hint=hint) from None
    try:
        text = data.decode("utf-8-sig")
        values = tomllib.loads(text) if kind == ".toml" else json.loads(text)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        hint = "save it as UTF-8"
        raise ConfigError(f"is not UTF-8 (line {line})", where=where, hint=hint) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not TOML: {error}", where=where, hint="correct it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=where, hint="correct it") from None
    if not isinstance(values, dict):
        raise ConfigError("has no [[datasets]]", where=where, hint="name a dataset file")
    return values


def general_of(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the keys of `[general]`, none where a file has no such table.

    Raises:
        ConfigError: it is something else.
    """
    found = values.get("general", {})
    if not isinstance(found, dict):
        where = f"{file}: general"
        raise ConfigError("is no table", where=where, hint="write it as [general]")
    return found


def tables(values: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the values of each table of a list: `datasets[0]`.

    `where` names what has the list: the file, and the table in it.

    Raises:
        ConfigError: the value is no list of tables.
    """
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        hint = f"write it as [[{key}]]"
        raise ConfigError("is no list of tables", where=f"{where}{key}", hint=hint)
    for number, each in enumerate(found):
        yield f"{key}[{number}]", each


def checked(
    kind: type[_Keys],
    values: Mapping[str, Any],
    *,
    file: Path,
    where: str,
    inherited: Collection[str] = (),
) -> _Keys:
    """Return the keys of a table with their types checked.

    Args:
        kind: the keys that it may have.
        values: of the table.
        file: of the table, for messages.
        where: its place there.
        inherited: keys that `[general]` holds in its place.

    Raises:
        ConfigError: a value is of another type, or a required key is missing.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "general" if first["loc"][:1] and first["loc"][0] in inherited else where
        raise ConfigError(
            _said(first["msg"]),
            where=f"{file}: {where}.{_place(first['loc'])}",
            hint="correct it: its trainer refuses it too",
        ) from None


def _said(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _place(places: Sequence[int | str]) -> str:
    return ".".join(map(str, places))
