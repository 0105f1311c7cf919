"""Facts about files, remembered by their stat, so that no file is read twice.

You can delete the memo at any time: headers and sources are the truth. Only the process that plans
opens it. Where it cannot be written (locked, read-only, full), planning goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from latentmake import digest
from latentmake.digest import SourceStat, TargetStat, source_stat, target_stat
from latentmake.errors import CacheError, first_line
from latentmake.files.cachefile import Picture
from latentmake.files.workspace import is_text
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media

MEMO = Path(".latentmake/memo.sqlite")  # of a project
Stat = TypeVar("Stat", bound=tuple[int, ...])
_VERSION = 7
_SECONDS = 5.0  # after which new facts are saved
_KEPT_NS = 90 * 24 * 3600 * 10**9  # after which answers and remembered states are forgotten
_FEW = 2000  # names that are looked up one by one, not by reading all between the first and last
# Kinds of facts. Version 0.2.0, to which a user may return, uses 4, 5, 8, 10 and 11 for others.
_SOURCE, _TARGET, _MEDIA, _PICTURE, _VERDICT = 1, 2, 3, 6, 7
_RECEIPT, _TEXT, _RATE, _SNAPSHOT = 9, 12, 13, 14
# Version 0.2.0 needs the table `entries`, which stays empty.
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS facts (kind INT, name TEXT, size INT, mtime_ns INT, ctime_ns INT,
    inode INT, value TEXT, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS source_sizes ON facts (size) WHERE kind = {_SOURCE};
CREATE INDEX IF NOT EXISTS target_keys ON facts (value) WHERE kind = {_TARGET};
CREATE TABLE IF NOT EXISTS entries (list INT, name TEXT, caption TEXT, tags TEXT,
    PRIMARY KEY (list, name)) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""
# Without statistics, SQLite would rather read all facts of the kind.
_INDEXES = {"size": "INDEXED BY source_sizes", "value": "INDEXED BY target_keys"}
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # of its schema
_MEDIA_OF = TypeAdapter(Media).validate_json
_LISTED = "IN (SELECT value FROM json_each(?))"

Listing = dict[str, TargetStat]
"""Path -> stat of each file of a folder."""


class Table(Generic[Stat]):
    """Facts of one kind: from a name, usually a path, to a stat and a text, or bytes.

    New facts lie in the dictionary `new` until the memo is saved; None is a forgotten fact.
    """

    def __init__(self, memo: Memo, kind: int, stat: type[Any]) -> None:
        self._memo, self._kind, self._stat = memo, kind, stat
        self._columns = ("name", *stat._fields, "value")
        self.new: dict[str, tuple[Any, Any] | None] = {}

    def learn(self, name: str, stat: Stat | None, value: str | bytes) -> None:
        """Remember a fact; `stat` is None if it is about no file, and its time counts."""
        if is_text(name):
            self.new[name] = stat or (None, time.time_ns(), None), value
            # A plan may be killed, and must not lose what took long.
            if time.monotonic() - self._memo.saved > _SECONDS:
                self._memo.save()

    def forget(self, names: Iterable[str]) -> None:
        """Forget facts, because their files are gone."""
        self.new.update(dict.fromkeys(names))

    def get(self, name: str, stat: Stat | None = None) -> Any:
        """Return a value, if it is known and has this stat (or any, without `stat`)."""
        found = self.known([name]).get(name)
        return None if found is None or stat not in (None, found[0]) else found[1]

    def below(self, folder: str, most: int = -1) -> dict[str, tuple[Stat, str]]:
        """Return path -> stat and value of the facts below a folder; "" stands for all."""
        # These paths are one range of the primary key: "/" is followed by "0".
        first, last = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")
        new = {name: fact for name, fact in self.new.items() if fact and first < name < last}
        return self._saved(f"name > ? AND name < ? LIMIT {most}", first, last) | new

    def known(self, names: Collection[str]) -> dict[str, tuple[Stat, str]]:
        """Return path -> stat and value of some paths, and perhaps of others between them."""
        new = {name: fact for name in self.new.keys() & names if (fact := self.new[name])}
        if len(names) > _FEW:
            ends = [end(filter(is_text, names), default="") for end in (min, max)]
            return self._saved("name BETWEEN ? AND ?", *ends) | new
        return self._saved(f"name {_LISTED}", json.dumps([*names])) | new

    def where(self, column: str, values: Iterable[object]) -> Iterator[tuple[str, Stat, str]]:
        """Yield name, stat and value of the facts with one of some values in an indexed column."""
        wanted, place = set(values), self._columns.index(column) - 1
        found = self._saved(f"{column} {_LISTED}", json.dumps([*wanted]), index=_INDEXES[column])
        found |= {name: x for name, x in self.new.items() if x and (*x[0], x[1])[place] in wanted}
        return ((name, self._stat._make(stat), value) for name, (stat, value) in found.items())

    def any(self, folder: str = "") -> bool:
        """Whether there is a fact below a folder."""
        return bool(self.below(folder, len(self.new) + 1))  # each new fact hides one row at most

    def write(self) -> None:
        """Write the new facts to the database."""
        gone = [(self._kind, name) for name, fact in self.new.items() if fact is None]
        rows = [(self._kind, name, *fact[0], fact[1]) for name, fact in self.new.items() if fact]
        columns, marks = ", ".join(self._columns), ", ?" * len(self._columns)
        insert = f"INSERT OR REPLACE INTO facts (kind, {columns}) VALUES (?{marks})"  # noqa: S608
        self._memo.database.executemany("DELETE FROM facts WHERE kind = ? AND name = ?", gone)
        self._memo.database.executemany(insert, rows)

    def _saved(self, condition: str, *values: str, index: str = "") -> dict[str, Any]:
        """Return name -> stat, as a plain tuple, and value of saved facts without a newer one."""
        # The kind stands in the text, because SQLite uses an index of one kind only then.
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
        return {row[0]: (row[1:-1], row[-1]) for row in rows if row[0] not in self.new}


class Memo(contextlib.AbstractContextManager["Memo"]):
    """A dictionary in an SQLite file, or in memory; facts are known as soon as they are learnt.

    It is written every few seconds, and by `save`. `is_new`: it knew no source when it was opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._place = str(path or ":memory:")
        self.database = _connect(self._place)
        self.saved = time.monotonic()
        self.sources: Table[SourceStat] = Table(self, _SOURCE, SourceStat)  # path -> digest
        self.targets: Table[TargetStat] = Table(self, _TARGET, TargetStat)  # cache file -> key
        self.texts: Table[SourceStat] = Table(self, _TEXT, SourceStat)  # path -> text of a file
        self.receipts: Table[TargetStat] = Table(self, _RECEIPT, TargetStat)  # names of read ones
        self.snapshots: Table[TargetStat] = Table(self, _SNAPSHOT, TargetStat)  # `plan.remembered`
        self.verdicts: Table[TargetStat] = Table(self, _VERDICT, TargetStat)  # question -> answer
        self._media: Table[SourceStat] = Table(self, _MEDIA, SourceStat)
        self._pictures: Table[TargetStat] = Table(self, _PICTURE, TargetStat)  # digest -> size
        self.rates: Table[TargetStat] = Table(self, _RATE, TargetStat)  # `plan.receipts`
        self._tables = [each for each in vars(self).values() if isinstance(each, Table)]
        self.is_new = not self.sources.any()

    def __exit__(self, *error: object) -> None:
        self.save()
        self.database.close()

    def save(self) -> None:
        """Write the new facts; a memo that cannot be written stays as it is."""
        self.saved = time.monotonic()
        if not any(table.new for table in self._tables):
            return
        try:
            with self.database:  # all or nothing
                self.database.execute("BEGIN IMMEDIATE")
                for table in self._tables:
                    table.write()
                old = "DELETE FROM facts WHERE kind IN (?, ?) AND mtime_ns < ?"
                self.database.execute(old, (_VERDICT, _SNAPSHOT, time.time_ns() - _KEPT_NS))
            for table in self._tables:
                table.new.clear()
        except sqlite3.Error as error:
            self.make_anew(error)  # the next `save` writes them

    def make_anew(self, error: Exception) -> None:
        """Begin an empty memo if an error says that this one is damaged; not where it is locked."""
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, sqlite3.Error) and code not in _DAMAGE and "UTF-8" not in str(error):
            return
        self.database.close()
        self.database = _anew(self._place, first_line(error))

    def digest_of_file(self, path: Path | digest.Section) -> str:
        """Return the digest of a file or of a part of one, reading it only if its stat is new."""
        name, stat = str(path), source_stat(path.stat())
        if known := self.sources.get(name, stat):
            return str(known)
        content = digest.of_file(path)
        self.sources.learn(name, stat, content)
        return content

    def media(self, paths: Collection[str]) -> dict[str, tuple[SourceStat, Media]]:
        """Return stat, size and length of known images and videos; see `Table.known`."""
        found = self._media.known(paths).items()
        rows = ((path, stat, text) for path, (stat, text) in found if text[:1] == "[")  # since 0.2
        try:
            return {path: (stat, _MEDIA_OF(text)) for path, stat, text in rows}
        except ValueError as error:
            self.make_anew(error)
            return {}

    def learn_media(self, path: str, stat: SourceStat, media: Media) -> None:
        """Remember an image's or a video's size and length."""
        self._media.learn(path, stat, json.dumps(media))

    def pictures(self, contents: Iterable[str], *, upright: bool) -> dict[str, Size]:
        """Return the known sizes of images, as EXIF turns them or not, by their files' digests."""
        found = self._pictures.known([f"{upright:d}{content}" for content in contents])
        try:
            return {name[1:]: Size(*map(int, size.split())) for name, (_, size) in found.items()}
        except (ValueError, TypeError) as error:
            self.make_anew(error)
            return {}

    def learn_picture(self, content: str, picture: Picture) -> None:
        """Remember the size of an image by the digest of its file."""
        width, height, upright = picture.width, picture.height, picture.upright
        self._pictures.learn(f"{upright:d}{content}", None, f"{width} {height}")

    def remembered(self, question: object, find: Callable[[], tuple[Any, Iterable[object]]]) -> Any:
        """Return a fact from `find`, which names its paths too: asked again if a stat is new."""
        name = digest.of_value(["remembered", 2, question])
        check, _, known = (self.verdicts.get(name) or "").partition(" ")
        whole = known and digest.of_bytes(known.encode()) == check
        stats, fact = json.loads(known) if whole else (None, None)
        if stats is None or stats != _stats(stats):
            fact, paths = find()
            known = json.dumps([_stats(map(str, paths)), fact])
            self.verdicts.learn(name, None, f"{digest.of_bytes(known.encode())} {known}")
        return fact


def _connect(place: str) -> sqlite3.Connection:
    """Open the memo, or one in memory if that is impossible (locked, read-only, full)."""
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
            fault = ""  # of another version
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            fault = str(error)
        database.close()
        return _anew(place, fault)
    return _connect(":memory:")


def _anew(place: str, fault: str) -> sqlite3.Connection:
    """Delete a memo and open an empty one; of a damaged one, say its fault."""
    if fault:
        sys.stderr.write(f"note: {place} is damaged ({fault}); Latentmake makes it anew\n")
    try:
        Path(place).unlink(missing_ok=True)
    except OSError:
        place = ":memory:"
    return _connect(place)


def _stats(paths: Iterable[str]) -> dict[str, list[int] | None]:
    found: dict[str, list[int] | None] = dict.fromkeys(paths)
    for path in found:
        with contextlib.suppress(OSError):
            found[path] = list(target_stat(os.stat(path)))  # noqa: PTH116 -- hundreds of files
    return found


# -- listing of a cache folder -------------------------------------------------------------------

unpacked: Callable[[bytes], list[Any]] = marshal.loads
"""Return the entries of a block that `packed` made."""


class Folder:
    """Files of a cache folder and its sub-folders.

    Links to folders outside of it are followed. Other links are listed like files, because they may
    lead in circles. A folder that cannot be read is a CacheError.

    Attributes:
        blocks: each folder's path, and some of its files: name, size, mtime_ns and inode, `packed`.
        fingerprint: digest of all that.
        has_links: whether any of them is a symbolic link.
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
        """Yield the files of a folder; add its sub-folders to those that are pending."""
        # Listed by its number, the kernel need not look up the folder for each file. Plain tuples
        # and little else: this loop is the cost of a plan with nothing to do.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(place) as found:
                for entry in found:
                    if not entry.is_file(follow_symlinks=False):
                        self.has_links |= entry.is_symlink()
                        path = f"{folder}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False) or self._leads_out(path):
                            pending.append(path)
                            continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # a running job has renamed or removed it since
                    yield entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino
        finally:
            os.close(place)

    def _leads_out(self, path: str) -> bool:
        """Whether a path is a link to a folder that is not listed yet; notes that folder."""
        if not (Path(path).is_symlink() and Path(path).is_dir()):
            return False
        place = f"{os.path.realpath(path).rstrip('/')}/"
        if any(place.startswith(each) or each.startswith(place) for each in self._places):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return the path and stat of every file."""
        files = ((folder, file) for folder, block in self.blocks for file in unpacked(block))
        return {f"{folder}/{name}": TargetStat(*stat) for folder, (name, *stat) in files}


def packed(entries: Iterable[Any]) -> Iterator[bytes]:
    """Pack the entries of a listing, tuples of text and whole numbers; equal ones equally."""
    entries = iter(entries)  # half a million tuples would cost more than the rest of a plan
    while block := [*islice(entries, 1024)]:
        yield marshal.dumps(block, 2)  # of version 2, because of what `of_entries` says
