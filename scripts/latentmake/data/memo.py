"""Facts about files, remembered by their stat, so that no file is read twice.

You can delete the memo at any time: headers and sources are the truth. Only the process that plans
opens it. If it cannot be written (locked, read-only or full disk), planning goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from latentmake.base import digest
from latentmake.base.digest import SourceStat, TargetStat, source_stat, target_stat
from latentmake.base.errors import CacheError, escaped, first_line
from latentmake.base.paths import is_text
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media

MEMO = Path(".latentmake/memo.sqlite")  # the memo of a project, below its folder
Stat = TypeVar("Stat", bound=tuple[int, ...])
_VERSION = 7
_ALL = 1 << 64  # SQLite keeps an integer of 64 bits with a sign, and an inode has none
_SECONDS = 5.0  # time after which new facts are saved
_KEPT_NS = 90 * 24 * 3600 * 10**9  # time after which answers and remembered states are forgotten
_FEW = 2000  # most names that are looked up singly; for more, the range from first to last is read
# Kinds of facts. Numbers 4, 5, 8, 10 and 11 are taken by version 0.2.0, which users may go back to.
_SOURCE, _TARGET, _MEDIA, _PICTURE, _VERDICT = 1, 2, 3, 6, 7
_RECEIPT, _TEXT, _RATE, _SNAPSHOT = 9, 12, 13, 14
# The table `entries` stays empty; version 0.2.0 needs it.
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS facts (kind INT, name TEXT, size INT, mtime_ns INT, ctime_ns INT,
    inode INT, value TEXT, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS source_sizes ON facts (size) WHERE kind = {_SOURCE};
CREATE INDEX IF NOT EXISTS target_keys ON facts (value) WHERE kind = {_TARGET};
CREATE TABLE IF NOT EXISTS entries (list INT, name TEXT, caption TEXT, tags TEXT,
    PRIMARY KEY (list, name)) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""
# SQLite has no statistics here, and without these words would read all facts of the kind.
_INDEXES = {"size": "INDEXED BY source_sizes", "value": "INDEXED BY target_keys"}
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
)  # the last one means a wrong schema
_MEDIA_OF = TypeAdapter(Media).validate_json
_LISTED = "IN (SELECT value FROM json_each(?))"

Listing = dict[str, TargetStat]
"""Path -> stat of each file of a folder."""


class Table(Generic[Stat]):
    """Facts of one kind: a name, usually a path, has a stat and a value (text or bytes).

    Attributes:
        new: name -> stat and value of facts that are not saved yet; None is a forgotten fact.
    """

    def __init__(self, memo: Memo, kind: int, stat: type[Any]) -> None:
        self._memo, self._kind, self._stat = memo, kind, stat
        self._columns = ("name", *stat._fields, "value")
        self.new: dict[str, tuple[Any, Any] | None] = {}

    def learn(self, name: str, stat: Stat | None, value: str | bytes) -> None:
        """Remember a fact; if it is about no file, `stat` is None and the present time is noted."""
        if is_text(name):
            self.new[name] = stat or (None, time.time_ns(), None), value
            # A plan may be killed. It must not lose digests that took long to compute.
            if time.monotonic() - self._memo.saved > _SECONDS:
                self._memo.save()

    def forget(self, names: Iterable[str]) -> None:
        """Forget facts, because their files are gone."""
        self.new.update(dict.fromkeys(names))

    def get(self, name: str, stat: Stat | None = None) -> Any:
        """Return the value of a name, if its stat is `stat` or that is None; else return None."""
        fact = self.look_up([name]).get(name)
        return None if fact is None or stat not in (None, fact[0]) else fact[1]

    def below(self, folder: str, most: int = -1) -> dict[str, tuple[Stat, str]]:
        """Return path -> stat and value of facts below a folder; "" stands for all facts."""
        # These paths are one range of the primary key, because "0" follows "/" in ASCII.
        first, last = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")
        new = {name: fact for name, fact in self.new.items() if fact and first < name < last}
        return self._saved(f"name > ? AND name < ? LIMIT {most}", first, last) | new

    def look_up(self, names: Collection[str]) -> dict[str, tuple[Stat, str]]:
        """Return path -> stat and value of some paths, and perhaps of others in their range."""
        new = {name: fact for name in self.new.keys() & names if (fact := self.new[name])}
        if len(names) > _FEW:
            if not is_text("".join(names)):
                names = [*filter(is_text, names)]
            ends = min(names, default=""), max(names, default="")
            return self._saved("name BETWEEN ? AND ?", *ends) | new
        return self._saved(f"name {_LISTED}", json.dumps([*names])) | new

    def where(self, column: str, values: Iterable[object]) -> Iterator[tuple[str, Stat, str]]:
        """Yield name, stat and value of facts that have one of `values` in an indexed column."""
        wanted, place = set(values), self._columns.index(column) - 1
        facts = self._saved(f"{column} {_LISTED}", json.dumps([*wanted]), index=_INDEXES[column])
        new = ((name, fact) for name, fact in self.new.items() if fact)
        facts |= {name: fact for name, fact in new if [*fact[0], fact[1]][place] in wanted}
        return ((name, self._stat._make(stat), value) for name, (stat, value) in facts.items())

    def any(self, folder: str = "") -> bool:
        """Return whether there is a fact below a folder."""
        return bool(self.below(folder, len(self.new) + 1))  # one row more than new facts can hide

    def write(self) -> None:
        """Write the new facts to the database."""
        gone = [(self._kind, name) for name, fact in self.new.items() if fact is None]
        rows = [(self._kind, name, *fact[0], fact[1]) for name, fact in self.new.items() if fact]
        columns, marks = ", ".join(self._columns), ", ?" * len(self._columns)
        insert = f"INSERT OR REPLACE INTO facts (kind, {columns}) VALUES (?{marks})"  # noqa: S608
        self._memo.database.executemany("DELETE FROM facts WHERE kind = ? AND name = ?", gone)
        try:
            self._memo.database.executemany(insert, rows)
        except OverflowError:  # the date of a file is after 2262, or its inode has all 64 bits
            signed = [[_signed(own) for own in row] for row in rows]
            self._memo.database.executemany(insert, signed)

    def _saved(self, condition: str, *values: str, index: str = "") -> dict[str, Any]:
        """Return name -> stat (a plain tuple) and value of saved facts that no new fact hides."""
        # The kind is in the text, because only then SQLite uses the partial index of this kind.
        table = f"facts {index} WHERE kind = {self._kind} AND {condition}"
        query = f"SELECT {', '.join(self._columns)} FROM {table}"  # noqa: S608
        kind = bytes if self._kind == _SNAPSHOT else str
        try:
            rows = self._memo.database.execute(query, values).fetchall()
            if not all(isinstance(row[-1], kind) for row in rows):
                raise TypeError("it has a value of another type")
        except (sqlite3.Error, TypeError) as error:
            self._memo.make_anew(error)
            return {}
        rows = [row for row in rows if row[0] not in self.new]
        facts = {row[0]: (row[1:-1], row[-1]) for row in rows}
        negative = [row for row in rows if row[-2].__class__ is int and row[-2] < 0]
        facts.update({row[0]: ((*row[1:-2], row[-2] + _ALL), row[-1]) for row in negative})
        return facts


def _signed(value: Any) -> Any:
    """Return an integer modulo 2^64, as SQLite keeps it, with a sign; any other value as it is."""
    return (value + _ALL // 2) % _ALL - _ALL // 2 if isinstance(value, int) else value


class Memo(contextlib.AbstractContextManager["Memo"]):
    """A dictionary in an SQLite file, or in memory; new facts can be looked up at once.

    It is written every few seconds, and by `save`.

    Attributes:
        is_new: whether it had no source when it was opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._place = str(path or ":memory:")
        self.database = _connect(self._place)
        self.saved = time.monotonic()
        self.sources: Table[SourceStat] = Table(self, _SOURCE, SourceStat)  # path -> digest
        self.targets: Table[TargetStat] = Table(self, _TARGET, TargetStat)  # cache file -> key
        self.texts: Table[SourceStat] = Table(self, _TEXT, SourceStat)  # path -> text of a file
        self.receipts: Table[TargetStat] = Table(self, _RECEIPT, TargetStat)  # names of learnt ones
        self.snapshots: Table[TargetStat] = Table(self, _SNAPSHOT, TargetStat)  # `plan.remembered`
        self.verdicts: Table[TargetStat] = Table(self, _VERDICT, TargetStat)  # question -> answer
        self._media: Table[SourceStat] = Table(self, _MEDIA, SourceStat)
        self._pictures: Table[TargetStat] = Table(self, _PICTURE, TargetStat)  # digest -> size
        self.rates: Table[TargetStat] = Table(self, _RATE, TargetStat)  # `plan.estimates`
        self._tables = [table for table in vars(self).values() if isinstance(table, Table)]
        self.is_new = not self.sources.any()

    def __exit__(self, *error: object) -> None:
        self.save()
        self.database.close()

    def save(self) -> None:
        """Write the new facts; a memo that cannot be written keeps its old content."""
        self.saved = time.monotonic()
        if not any(table.new for table in self._tables):
            return
        try:
            with self.database:  # one transaction: all or nothing
                self.database.execute("BEGIN IMMEDIATE")
                for table in self._tables:
                    table.write()
                old = "DELETE FROM facts WHERE kind IN (?, ?) AND mtime_ns < ?"
                self.database.execute(old, (_VERDICT, _SNAPSHOT, time.time_ns() - _KEPT_NS))
            for table in self._tables:
                table.new.clear()
        except sqlite3.Error as error:
            self.make_anew(error)  # the facts stay in `new`, and the next `save` writes them

    def make_anew(self, error: Exception) -> None:
        """Begin an empty memo if the error means damage; a memo that is locked or full stays."""
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, sqlite3.Error) and code not in _DAMAGE and "UTF-8" not in str(error):
            return
        self.database.close()
        self.database = _anew(self._place, first_line(error))

    def digest_of_file(self, path: Path | digest.Section) -> str:
        """Return the digest of a file, or of a section of it. Read it only if its stat is new."""
        name, stat = str(path), source_stat(path.stat())
        if content_before := self.sources.get(name, stat):
            return str(content_before)
        content = digest.of_file(path)
        self.sources.learn(name, stat, content)
        return content

    def media(self, stats: Mapping[str, SourceStat]) -> dict[str, Media]:
        """Return path -> size and length of the images and videos that still have these stats."""
        facts = self._media.look_up(stats).items()
        texts = {path: text for path, (stat, text) in facts if stats.get(path) == stat}
        try:
            # Rows of releases before 0.2 have another format.
            return {path: _MEDIA_OF(text) for path, text in texts.items() if text[:1] == "["}
        except ValueError as error:
            self.make_anew(error)
            return {}

    def learn_media(self, path: str, stat: SourceStat, media: Media) -> None:
        """Remember the size and length of an image or video."""
        self._media.learn(path, stat, json.dumps(media))

    def pictures(self, contents: Iterable[str], *, upright: bool) -> dict[str, Size]:
        """Return digest -> size of known images; `upright` means turned as EXIF says."""
        facts = self._pictures.look_up([f"{upright:d}{content}" for content in contents])
        try:
            return {name[1:]: Size(*map(int, size.split())) for name, (_, size) in facts.items()}
        except (ValueError, TypeError) as error:
            self.make_anew(error)
            return {}

    def learn_picture(self, content: str, width: int, height: int, upright: bool) -> None:
        """Remember the size of an image by the digest of its file."""
        self._pictures.learn(f"{upright:d}{content}", None, f"{width} {height}")

    def remembered(self, question: object, find: Callable[[], tuple[Any, Iterable[object]]]) -> Any:
        """Return a fact from `find`, which also returns the paths it depends on.

        `find` is called again only if the stat of such a path has changed.
        """
        name = digest.of_value(["remembered", 2, question])
        check, _, text = (self.verdicts.get(name) or "").partition(" ")
        intact = text and digest.of_bytes(text.encode()) == check
        stats, fact = json.loads(text) if intact else (None, None)
        if stats is None or stats != _stats(stats):
            fact, paths = find()
            text = json.dumps([_stats(map(str, paths)), fact])
            self.verdicts.learn(name, None, f"{digest.of_bytes(text.encode())} {text}")
        return fact


def _connect(place: str) -> sqlite3.Connection:
    """Open the memo, or one in memory if that fails (locked, read-only or full disk)."""
    with contextlib.suppress(sqlite3.OperationalError, OSError):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(place, timeout=1, isolation_level=None)
        try:
            database.execute("PRAGMA cache_size = -32768")  # KiB
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                database.executescript(_SCHEMA)
            if version in (0, _VERSION):
                return database
            fault = ""  # a memo of another version is no damage
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            fault = escaped(str(error))
        database.close()
        return _anew(place, fault)
    return _connect(":memory:")


def _anew(place: str, fault: str) -> sqlite3.Connection:
    """Delete a memo and open an empty one; print the fault of a damaged one."""
    if fault:
        sys.stderr.write(f"note: {place} is damaged ({fault}); Latentmake makes it anew\n")
    try:
        Path(place).unlink(missing_ok=True)
    except OSError:
        place = ":memory:"
    return _connect(place)


def _stats(paths: Iterable[str]) -> dict[str, list[int] | None]:
    stats: dict[str, list[int] | None] = dict.fromkeys(paths)
    for path in stats:
        with contextlib.suppress(OSError):
            stats[path] = list(target_stat(os.stat(path)))  # noqa: PTH116 -- hundreds of files
    return stats


# -- listing of a cache folder -------------------------------------------------------------------

unpacked: Callable[[bytes], list[Any]] = marshal.loads
"""Return the entries of a block from `packed`."""


class Folder:
    """Files of a cache folder and its sub-folders.

    Links to folders outside of it are followed. Other links are listed like files, because they may
    lead in circles.

    Attributes:
        blocks: path of a folder, and some of its files, `packed`: name, size, mtime_ns and inode.
        fingerprint: digest of all blocks.
        has_links: whether the folder has a symbolic link.

    Raises:
        CacheError: a folder cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.blocks: list[tuple[str, bytes]] = []
        self.has_links = False
        self._places = [f"{os.path.realpath(path).rstrip('/')}/"]
        pending = [path]
        while pending:
            folder = pending.pop()
            try:
                self.blocks += ((folder, block) for block in packed(self._files(folder, pending)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                raise CacheError(what, where=folder, hint="check its permissions") from None
        digests = [(folder, digest.of_bytes(block)) for folder, block in self.blocks]
        self.fingerprint = digest.of_entries(sorted(digests))

    def _files(self, folder: str, pending: list[str]) -> Iterator[tuple[str, int, int, int]]:
        """Yield the files of a folder; add its sub-folders to `pending`."""
        # With the folder's descriptor, the kernel need not look up the folder for each file. The
        # loop makes plain tuples and little else: it is the cost of a plan with nothing to do.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if not entry.is_file(follow_symlinks=False):
                        self.has_links |= entry.is_symlink()
                        path = f"{folder}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False) or self._leads_out(path):
                            pending.append(path)
                            continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # a running job renamed or removed it meanwhile
                    yield entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino
        finally:
            os.close(place)

    def _leads_out(self, path: str) -> bool:
        """Return whether a path is a link to a folder that is not listed yet; note that folder."""
        if not (Path(path).is_symlink() and Path(path).is_dir()):
            return False
        place = f"{os.path.realpath(path).rstrip('/')}/"
        if any(place.startswith(other) or other.startswith(place) for other in self._places):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return the path and stat of every file."""
        files = ((folder, file) for folder, block in self.blocks for file in unpacked(block))
        return {f"{folder}/{name}": TargetStat(*stat) for folder, (name, *stat) in files}


def packed(entries: Iterable[Any]) -> Iterator[bytes]:
    """Pack the entries of a listing, tuples of text and integers; equal ones give equal bytes."""
    entries = iter(
        entries
    )  # a list of half a million tuples would cost more than the rest of a plan
    while block := [*islice(entries, 1024)]:
        yield marshal.dumps(block, 2)  # version 2 for the reason in `of_entries`
