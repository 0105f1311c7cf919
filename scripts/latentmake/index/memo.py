"""Facts about files, remembered by their stat, so that no file is read twice.

The memo can be deleted at any time: headers and sources are the truth. Only the process that plans
opens it. Where it cannot be written (locked, read-only, full), planning goes on without.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake import digest
from latentmake.files.cachefile import Picture
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size
from latentmake.index.table import (
    NoStat,
    SourceStat,
    Stat,
    Table,
    TargetStat,
    matching,
    source_stat,
    target_stat,
)

__all__ = [
    "MEMO",
    "Entry",
    "Listed",
    "Memo",
    "SourceStat",
    "Table",
    "TargetStat",
    "source_stat",
    "target_stat",
]

MEMO = Path(".latentmake/memo.sqlite")
"""The memo of a project."""
_VERSION = 7
_CACHE = 32_768  # KiB of pages
_SECONDS, _MANY = 5.0, 50_000  # time and number of new facts after which these are saved
_VERDICT_NS = 90 * 24 * 3600 * 10**9  # after which a verdict is forgotten
# Kinds of facts, by number; texts of former versions lack empty lines.
_SOURCE, _TARGET, _MEDIA, _OLD_TEXT, _LIST, _PICTURE, _VERDICT, _OLD_RATE, _RECEIPT, _RATE = range(
    1, 11
)
_SNAPSHOT, _TEXT = 11, 12
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS facts (
    kind INT, name TEXT, size INT, mtime_ns INT, ctime_ns INT, inode INT, value TEXT,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS source_sizes ON facts (size) WHERE kind = {_SOURCE};
CREATE INDEX IF NOT EXISTS target_keys ON facts (value) WHERE kind = {_TARGET};
CREATE TABLE IF NOT EXISTS entries (
    list INT, name TEXT, caption TEXT, tags TEXT, PRIMARY KEY (list, name)
) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""


class Entry(NamedTuple):
    """An image's entry in a metadata file: its name there, and its caption and tags, if any."""

    name: str
    caption: str | None
    tags: str | None


class Listed:
    """The entries of one metadata file, on disk: there may be more than memory holds."""

    def __init__(self, database: sqlite3.Connection, number: int, count: int) -> None:
        self._database, self._number, self.count = database, number, count

    def find(self, names: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of some names."""
        query = "SELECT name, caption, tags FROM entries WHERE list = ? AND name"
        rows = matching(self._database, query, [self._number], names)
        return {row[0]: Entry(*row) for row in rows}

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, in the order of their names."""
        query = "SELECT name, caption, tags FROM entries WHERE list = ? ORDER BY name"
        return (Entry(*row) for row in self._database.execute(query, (self._number,)))

    def names(self) -> Iterator[str]:
        """Yield all names, in order."""
        query = "SELECT name FROM entries WHERE list = ? ORDER BY name"
        return (row[0] for row in self._database.execute(query, (self._number,)))


class Memo(contextlib.AbstractContextManager["Memo"]):
    """A dictionary in an SQLite file, or in memory; what is learnt is known at once.

    It is written every few seconds, and by `save` at the end of a plan.

    Attributes:
        is_new: whether it knew no source when it was opened: it was deleted, or never was.
        sources: path -> digest.
        targets: path of a cache file -> key.
        texts: path of a file of text -> its content.
        receipts: names of those that were taken in.
        rates: kind and model -> past jobs; see `plan.estimates`.
        snapshots: see `plan.snapshots`; forgotten after 90 days.
    """

    def __init__(self, path: Path | None) -> None:
        self._database = _open(path)
        self._saved, self._count = time.monotonic(), 0  # of the last save, and facts since then
        self._tables: list[Table[Any]] = []
        self.sources = self._table(_SOURCE, SourceStat)
        self.targets = self._table(_TARGET, TargetStat)
        self.texts = self._table(_TEXT, SourceStat)
        self.receipts = self._table(_RECEIPT, NoStat)
        self._verdicts = self._table(_VERDICT, NoStat)
        self.snapshots = self._table(_SNAPSHOT, NoStat)
        self._media = self._table(_MEDIA, SourceStat)
        self._lists = self._table(_LIST, SourceStat)  # number of a list, and its length
        # Whether it is turned as EXIF says, and digest -> width and height.
        self._pictures = self._table(_PICTURE, NoStat)
        self.rates = self._table(_RATE, NoStat)
        self.is_new = not self.sources.any()

    def __exit__(self, *error: object) -> None:
        self.save()
        self._database.close()

    def _table(self, kind: int, stat: type[Stat]) -> Table[Stat]:
        self._tables.append(Table(self._database, kind, stat, self._learnt))
        return self._tables[-1]

    def _learnt(self) -> None:
        """Save now and then: a plan may be killed, and what took long is not to be lost."""
        self._count += 1
        if self._count > _MANY or time.monotonic() - self._saved > _SECONDS:
            self.save()

    def save(self) -> None:
        """Write what was learnt; a memo that cannot be written stays as it is."""
        self._saved, self._count = time.monotonic(), 0
        if not any(table.new for table in self._tables):
            return
        old = (_VERDICT, _SNAPSHOT, time.time_ns() - _VERDICT_NS)
        with contextlib.suppress(sqlite3.Error):
            with _transaction(self._database):
                for table in self._tables:
                    table.write()
                self._database.execute(
                    "DELETE FROM facts WHERE kind IN (?, ?) AND mtime_ns < ?", old
                )
            for table in self._tables:
                table.new.clear()

    def digest_of_file(self, path: Path | digest.Section) -> str:
        """Return the digest of a file or of a part of one, reading it only if its stat is new."""
        name, stat = str(path), source_stat(path.stat())
        if known := self.sources.get(name, stat):
            return known
        content = digest.of_file(path)
        self.sources.learn(name, stat, content)
        return content

    def media(self, paths: Collection[str], *folders: str) -> dict[str, tuple[SourceStat, Media]]:
        """Return stat, size and length of known images and videos; see `Table.known`."""
        found = self._media.known(paths, *folders).items()
        known = {path: (stat, _media(text)) for path, (stat, text) in found}
        return {path: (stat, media) for path, (stat, media) in known.items() if media is not None}

    def learn_media(self, path: str, stat: SourceStat, media: Media) -> None:
        """Remember an image's or a video's size and length."""
        self._media.learn(path, stat, json.dumps(media))

    def pictures(self, contents: Iterable[str], *, upright: bool) -> dict[str, Size]:
        """Return the known sizes of images, as EXIF turns them or not, by their files' digests."""
        rows = self._pictures.where("name", [f"{upright:d}{content}" for content in contents])
        return {name[1:]: Size(*map(int, value.split())) for name, _, value in rows}

    def learn_picture(self, content: str, picture: Picture) -> None:
        """Remember the size of an image by the digest of its file."""
        size = f"{picture.width} {picture.height}"
        self._pictures.learn(f"{picture.upright:d}{content}", None, size)

    def listed(self, path: str, stat: SourceStat) -> Listed | None:
        """Return the entries of a metadata file of this stat, where it was read before."""
        found = self._lists.get(path, stat)
        return None if found is None else Listed(self._database, *map(int, found.split()))

    def learn_list(self, path: str, stat: SourceStat, entries: Iterable[Entry]) -> Listed:
        """Keep the entries of a metadata file, each as soon as it comes; all of them or none.

        Where the memo cannot be written, a temporary file of the system holds them. Errors of
        `entries` are passed on.
        """
        old, database = self._lists.get(path), self._database
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            old, database = None, _connect("")
            database.execute("BEGIN")
        with _transaction(database):
            if old is not None:
                database.execute("DELETE FROM entries WHERE list = ?", (old.split()[0],))
            ((number,),) = database.execute("SELECT ifnull(max(list), 0) + 1 FROM entries")
            rows = ((number, *entry) for entry in entries)
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)
            ((count,),) = database.execute("SELECT count(*) FROM entries WHERE list = ?", (number,))
            fact = (_LIST, path, *stat, f"{number} {count}")
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)", fact)
        return Listed(database, number, count)

    def verdict(self, question: str) -> str | None:
        """Return the answer given to a question (a digest of all it depends on), if any."""
        return self._verdicts.get(question)

    def learn_verdict(self, question: str, answer: str) -> None:
        """Remember the answer to a question, for 90 days."""
        self._verdicts.learn(question, None, answer)


def _media(text: str) -> Media | None:
    """Read the size and length of an image or video; None where timestamps are to be learnt."""
    if text.startswith("["):
        return Media(*json.loads(text))
    width, height, frames = map(int, text.split())  # as it was written before
    return None if frames else Media(width, height, 0)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit what is written within the `with`, or none of it."""
    try:
        if not database.in_transaction:
            database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _open(path: Path | None) -> sqlite3.Connection:
    """Open the memo, or one in memory where that is impossible."""
    for _ in range(2):
        if path is None:
            break
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _connect(str(path))
        except (sqlite3.OperationalError, OSError):
            break  # locked, read-only, full: plan without it
        except sqlite3.DatabaseError:  # damaged, or of another version
            with contextlib.suppress(OSError):
                path.unlink()
    return _connect(":memory:")


def _connect(place: str) -> sqlite3.Connection:
    database = sqlite3.connect(place, timeout=1, isolation_level=None)
    try:
        database.execute(f"PRAGMA cache_size = -{_CACHE}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError("written by another version")
        if version == 0:
            database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database
