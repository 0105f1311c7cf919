"""Tables of the memo: facts of one kind, from a name to a stat and a value."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

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


class Table(Generic[Stat]):
    """Facts of one kind: from a name, as a rule a path, to a stat and a text.

    New facts lie in a dictionary in front of the database until the memo is saved.

    Attributes:
        new: name -> row of name, stat and value; None of a fact that is forgotten.

    Args:
        database: of the memo.
        kind: number of the kind.
        stat: what a fact depends on.
        learnt: called after each new fact.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        kind: int,
        stat: type[Stat],
        learnt: Callable[[], None],
    ) -> None:
        self._database, self._learnt = database, learnt
        self._stat: type[Stat] = stat
        self.new: dict[str, tuple[Any, ...] | None] = {}
        columns = f"name, {', '.join(stat._fields)}, value"
        self._columns = columns.split(", ")
        self._those = f"FROM facts WHERE kind = {kind} AND"
        self._select = f"SELECT {columns} {self._those}"
        marks = ", ?" * (len(stat._fields) + 2)
        into = f"INTO facts (kind, {columns})"
        self._insert = f"INSERT OR REPLACE {into} VALUES ({kind}{marks})"  # noqa: S608

    def learn(self, name: str, stat: Stat | None, value: str | bytes) -> None:
        """Remember a fact; `stat` is None of one about no file."""
        if is_text(name):
            self.new[name] = (name, *(stat or (time.time_ns(),)), value)
            self._learnt()

    def forget(self, names: Iterable[str]) -> None:
        """Forget facts, of files that are gone."""
        self.new.update(dict.fromkeys(names))

    def write(self) -> None:
        """Write the new facts to the database."""
        gone = [(name,) for name, row in self.new.items() if row is None]
        self._database.executemany(f"DELETE {self._those} name = ?", gone)
        self._database.executemany(self._insert, [*filter(None, self.new.values())])

    def get(self, name: str, stat: Stat | None = None) -> str | None:
        """Return a value, if it is known and of this stat, where one is given."""
        found = self._row(name)
        return None if found is None or stat not in (None, found[1:-1]) else str(found[-1])

    def blob(self, name: str) -> bytes | None:
        """Return a value of bytes, if it is known."""
        found = self._row(name)
        return None if found is None else bytes(found[-1])

    def _row(self, name: str) -> tuple[Any, ...] | None:
        if name in self.new:
            return self.new[name]
        return next(iter(self._rows(f"{self._select} name = ?", name)), None)

    def below(self, folder: str) -> dict[str, tuple[Stat, str]]:
        """Return stat and value of every known path below a folder."""
        first, last = _range(folder)
        rows = self._rows(f"{self._select} name > ? AND name < ?", first, last)
        return self._facts(rows, (name for name in self.new if first < name < last))

    def known(self, names: Collection[str], *folders: str) -> dict[str, tuple[Stat, str]]:
        """Return stat and value of known paths: of these at least, which lie below some folders."""
        if len(names) > _FEW:
            return {path: fact for each in folders for path, fact in self.below(each).items()}
        rows: list[tuple[Any, ...]] = []
        with contextlib.suppress(sqlite3.Error):
            rows += matching(self._database, f"{self._select} name", [], names)
        return self._facts(rows, self.new.keys() & names)

    def _facts(
        self, rows: Iterable[tuple[Any, ...]], new: Iterable[str]
    ) -> dict[str, tuple[Stat, str]]:
        """Return the facts of some rows, and in front of these some new ones."""
        found = {row[0]: (row[1:-1], row[-1]) for row in rows}
        for name in new:
            if (row := self.new[name]) is None:
                found.pop(name, None)
            else:
                found[name] = row[1:-1], row[-1]
        return found  # type: ignore[return-value]

    def where(self, column: str, values: Iterable[object]) -> Iterator[tuple[str, Stat, str]]:
        """Yield name, stat and value of the facts that have one of some values in a column."""
        # Without statistics SQLite would rather go through all facts of the kind.
        index = f"FROM facts {_INDEXES.get(column, '')} WHERE"
        query = self._select.replace("FROM facts WHERE", index)
        wanted, new = {*values}, self.new.copy()
        place = self._columns.index(column)
        for row in filter(None, new.values()):
            if row[place] in wanted:
                yield row[0], self._stat._make(row[1:-1]), row[-1]
        with contextlib.suppress(sqlite3.Error):
            for row in matching(self._database, f"{query} {column}", [], wanted):
                if row[0] not in new:
                    yield row[0], self._stat._make(row[1:-1]), row[-1]

    def names(self) -> set[str]:
        """Return all names."""
        return {*self._facts(self._rows(f"{self._select} true"), self.new)}

    def any(self, folder: str = "") -> bool:
        """Whether there is a fact, below a folder if one is named; a forgotten one until saved."""
        first, last = _range(folder)
        query = f"SELECT 1 {self._those} name > ? AND name < ? LIMIT 1"
        new = any(row and first < name < last for name, row in self.new.items())
        return new or bool(self._rows(query, first, last))

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
