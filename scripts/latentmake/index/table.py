"""Tables of the memo: facts of one kind, from a name to a stat and a value."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = [
    "NoStat",
    "SourceStat",
    "Table",
    "TargetStat",
    "Unsaved",
    "is_text",
    "matching",
    "source_stat",
    "target_stat",
]

_AT_ONCE = 500  # names looked for by one query
_FEW = 2000  # names that are looked for one by one, not by going through a folder
_INDEXES = {"size": "INDEXED BY source_sizes", "value": "INDEXED BY target_keys"}


class SourceStat(NamedTuple):
    """Same stat, same bytes. The change time notices an edit whose mtime was set back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class TargetStat(NamedTuple):
    """The same for cache files, without the change time: giving one a second name alters it."""

    size: int
    mtime_ns: int
    inode: int


class NoStat(NamedTuple):
    """In place of a stat, of a fact about no file: when it was learnt."""

    mtime_ns: int


def source_stat(stat: os.stat_result) -> SourceStat:
    """Return what identifies a source's content."""
    return SourceStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def target_stat(stat: os.stat_result) -> TargetStat:
    """Return what identifies a cache file's content."""
    return TargetStat(stat.st_size, stat.st_mtime_ns, stat.st_ino)


Stat = TypeVar("Stat", SourceStat, TargetStat, NoStat)
Unsaved = defaultdict[str, list[tuple[object, ...]]]
"""Statement -> the rows to carry it out with."""


class Table(Generic[Stat]):
    """Facts of one kind: from a name, as a rule a path, to a stat and a text.

    What is learnt or forgotten is seen once the memo is saved.
    """

    def __init__(
        self, database: sqlite3.Connection, unsaved: Unsaved, kind: int, stat: type[Stat]
    ) -> None:
        self._database, self._unsaved = database, unsaved
        self._stat: type[Stat] = stat
        columns = f"name, {', '.join(stat._fields)}, value"
        self._those = f"FROM facts WHERE kind = {kind} AND"
        self._select = f"SELECT {columns} {self._those}"
        marks = ", ?" * (len(stat._fields) + 2)
        into = f"INTO facts (kind, {columns})"
        self._insert = f"INSERT OR REPLACE {into} VALUES ({kind}{marks})"  # noqa: S608

    def learn(self, name: str, stat: Stat | None, value: str | bytes) -> None:
        """Remember a fact; `stat` is None of one about no file."""
        if is_text(name):
            self._unsaved[self._insert].append((name, *(stat or (time.time_ns(),)), value))

    def forget(self, names: Iterable[str]) -> None:
        """Forget facts, of files that are gone."""
        self._unsaved[f"DELETE {self._those} name = ?"] += [(name,) for name in names]

    def get(self, name: str, stat: Stat | None = None) -> str | None:
        """Return a value, if it is known and of this stat, where one is given."""
        for row in self._rows(f"{self._select} name = ?", name):
            if stat is None or row[1:-1] == stat:
                return str(row[-1])
        return None

    def blob(self, name: str) -> bytes | None:
        """Return a value of bytes, if it is known."""
        found = self._rows(f"{self._select} name = ?", name)
        return bytes(found[0][-1]) if found else None

    def below(self, folder: str) -> dict[str, tuple[Stat, str]]:
        """Return stat and value of every known path below a folder."""
        rows = self._rows(f"{self._select} name > ? AND name < ?", *_range(folder))
        return {row[0]: (row[1:-1], row[-1]) for row in rows}  # type: ignore[misc]

    def known(self, names: Collection[str], *folders: str) -> dict[str, tuple[Stat, str]]:
        """Return stat and value of known paths: of these at least, which lie below some folders."""
        if len(names) > _FEW:
            return {path: fact for each in folders for path, fact in self.below(each).items()}
        with contextlib.suppress(sqlite3.Error):
            rows = matching(self._database, f"{self._select} name", [], names)
            return {row[0]: (row[1:-1], row[-1]) for row in rows}  # type: ignore[misc]
        return {}

    def where(self, column: str, values: Iterable[object]) -> Iterator[tuple[str, Stat, str]]:
        """Yield name, stat and value of the facts that have one of some values in a column."""
        # Without statistics SQLite would rather go through all facts of the kind.
        index = f"FROM facts {_INDEXES.get(column, '')} WHERE"
        query = self._select.replace("FROM facts WHERE", index)
        with contextlib.suppress(sqlite3.Error):
            for row in matching(self._database, f"{query} {column}", [], values):
                yield row[0], self._stat._make(row[1:-1]), row[-1]

    def names(self) -> set[str]:
        """Return all names."""
        return {row[0] for row in self._rows(f"SELECT name {self._those} true")}

    def any(self, folder: str = "") -> bool:
        """Whether there is a fact, below a folder if one is named."""
        return bool(
            self._rows(f"SELECT 1 {self._those} name > ? AND name < ? LIMIT 1", *_range(folder))
        )

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error:
            return []


def _range(folder: str) -> tuple[str, str]:
    # Paths below a folder are one range of the primary key: "/" is followed by "0".
    return (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")


def matching(
    database: sqlite3.Connection, query: str, first: Sequence[object], wanted: Iterable[object]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query `... IN (...)` for any number of values, some at a time."""
    values = [each for each in wanted if not isinstance(each, str) or is_text(each)]
    for start in range(0, len(values), _AT_ONCE):
        some = values[start : start + _AT_ONCE]
        marks = ",".join("?" * len(some))
        yield from database.execute(f"{query} IN ({marks})", (*first, *some))


def is_text(name: str) -> bool:
    """Whether a name can be in the database; the name of a foreign file may be no UTF-8."""
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False
