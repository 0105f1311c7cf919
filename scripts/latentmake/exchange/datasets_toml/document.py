"""A dataset file of another trainer, being read: its tables, its paths, notes about it.

Nothing in such a file is executed. A mistake is one line with the place of the key.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentmake.errors import ConfigError

_LARGEST = 10_000_000  # bytes: more is no file that somebody wrote
_SHOWN = 3  # paths in a note
_KINDS = {str: "a text", bool: "true or false", list: "a list", int: "a whole number"}

Table = Mapping[str, Any]


@dataclass
class Block:
    """A folder or list at one resolution.

    Attributes:
        values: keys of our dataset section.
        resolution: width and height in pixels; None where the file names none.
        batch_size: items a step.
        caches: folders that may hold caches of it.
    """

    values: dict[str, Any]
    resolution: tuple[int, int] | None
    batch_size: int
    caches: list[str]


@dataclass
class Document:
    """A dataset file being read.

    Attributes:
        path: of the file.
        run: name of the run that is made of it.
        values: its content.
        notes: what could not be taken over as it is, a line each.
        written: lists to write: path -> content.
        missing: paths that are not on this machine.
    """

    path: Path
    run: str
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    written: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)

    def note(self, line: str) -> None:
        """Note something that could not be taken over as it is, once."""
        if line not in self.notes:
            self.notes.append(line)

    def general(self) -> Table:
        """Return the keys of `[general]`."""
        found: Table = self.value(self.values, "general", dict, {}, "")
        return found

    def tables(self, table: Table, key: str, where: str = "") -> Iterator[tuple[str, Table]]:
        """Yield the place and the values of each table of a list: `datasets[0]`."""
        found = self.value(table, key, list, [], where)
        for number, each in enumerate(found):
            if not isinstance(each, dict):
                raise self._refusal(f"{where}{key}", f"write it as [[{key}]]")
            yield f"{where}{key}[{number}]", each

    def value(self, table: Table, key: str, kind: type, default: Any, where: str) -> Any:
        """Return a value of a table, of a kind; the default where there is none.

        Raises:
            ConfigError: the value is of another kind.
        """
        found = table.get(key)
        if found is None:
            return default
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            wanted = _KINDS.get(kind, "a table")
            raise self._refusal(f"{where}{'.' * bool(where)}{key}", f"it should be {wanted}")
        return found

    def resolution(self, table: Table, where: str) -> tuple[int, int] | None:
        """Return width and height of a table's `resolution`; None where there is none.

        Raises:
            ConfigError: it is neither a number nor two.
        """
        found = table.get("resolution")
        sides: list[Any] = found if isinstance(found, list) else [found, found]
        if found is None:
            return None
        if len(sides) != 2 or not all(type(side) is int for side in sides):
            hint = "it should be a number, or a width and a height such as [960, 544]"
            raise self._refusal(f"{where}.resolution", hint)
        return sides[0], sides[1]

    def _refusal(self, where: str, hint: str) -> ConfigError:
        return ConfigError("cannot be read", where=f"{self.path}: {where}", hint=hint)

    def unknown(self, where: str, table: Table, known: Collection[str], trainer: str) -> None:
        """Note the keys of a table that its trainer does not know."""
        for key in table:
            if key not in known:
                self.note(f"{where}.{key}: left out, {trainer} does not know this key")

    def find(self, path: str) -> Path:
        """Return the place of a path: as it is, or beside the file."""
        for place in (Path(path), self.path.parent / path):
            if place.exists():
                return place
        self.missing[path] = None
        return Path(path)

    def write(self, source: Path, ending: str, text: str) -> str:
        """Have a list written; return its path."""
        data, number = text.encode(), 1
        stem = source.stem if ending == ".jsonl" else f"{source.name}_captions"
        while True:
            path = f"runs/{self.run}/{stem}{f'_{number}' if number > 1 else ''}{ending}"
            if self.written.setdefault(path, data) == data:
                return path
            number += 1

    def note_missing(self) -> None:
        """Note the paths that are not on this machine."""
        if self.missing:
            names = [*self.missing]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(names[:_SHOWN])
            self.note(f"paths: correct them, they are not on this machine: {shown}{more}")


def as_path(path: Path) -> str:
    """Return a path for our configuration, which replaces `~` and `$NAME`."""
    text = str(path).replace("$", "$$")
    return f"./{text}" if text.startswith("~") else text


def read(path: Path) -> dict[str, Any]:
    """Return the content of a dataset file, TOML or JSON.

    Raises:
        ConfigError: it cannot be read.
    """
    kind = path.suffix.lower()
    if kind not in (".toml", ".json"):
        hint = "name a dataset file of musubi-tuner or sd-scripts"
        raise ConfigError("is neither a .toml nor a .json file", where=path, hint=hint)
    try:
        if path.stat().st_size > _LARGEST:
            hint = "name a dataset file"
            raise ConfigError(f"has more than {_LARGEST} bytes", where=path, hint=hint)
        text = path.read_bytes().decode("utf-8-sig")
        values = tomllib.loads(text) if kind == ".toml" else json.loads(text)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise ConfigError(what, where=path, hint="check the path") from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8", where=path, hint="save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        what = f"is not {kind[1:].upper()}: {error}"
        raise ConfigError(what, where=path, hint="correct it") from None
    if not isinstance(values, dict):
        raise ConfigError("has no [[datasets]]", where=path, hint="name a dataset file")
    return values
