"""The memo: what files of a given stat were found to hold, so that none is read twice.

It can be deleted at any time: headers and sources are the truth, the memo only spares reading
them. Only the process that plans opens it. Where it cannot be written (locked, read-only, full),
planning goes on with what it has.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from latentmake import digest
from latentmake.files.cachefile import Picture
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size

__all__ = [
    "Entry",
    "Listed",
    "Memo",
    "Rate",
    "SourceStat",
    "TargetStat",
    "source_stat",
    "target_stat",
]

_VERSION = 6
_OLDER = (0, 3, 4, 5)  # what they lack is added
_AT_ONCE = 500  # names looked for by one query
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, inode INT, digest TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS targets (
    path TEXT PRIMARY KEY, size INT, mtime_ns INT, inode INT, key TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sources_size ON sources (size);
CREATE INDEX IF NOT EXISTS targets_key ON targets (key);
CREATE TABLE IF NOT EXISTS media (
    path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, inode INT,
    width INT, height INT, frames INT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pictures (
    digest TEXT, upright INT, width INT, height INT, PRIMARY KEY (digest, upright)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verdicts (
    question TEXT PRIMARY KEY, answer TEXT, asked INT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rates (
    name TEXT PRIMARY KEY, targets REAL, seconds REAL, starting REAL, jobs REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (
    path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, inode INT, text TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lists (
    path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, inode INT, entries INT
);
CREATE TABLE IF NOT EXISTS entries (
    list INT, name TEXT, caption TEXT, tags TEXT, PRIMARY KEY (list, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS receipts (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class SourceStat(NamedTuple):
    """Same stat, same bytes. The change time notices an edit whose mtime was set back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class Rate(NamedTuple):
    """How fast past jobs of one kind and model were.

    Attributes:
        targets: that they encoded in a second.
        starting: seconds before the first of them.
    """

    targets: float
    starting: float


class TargetStat(NamedTuple):
    """The same for cache files, without the change time: giving one a second name alters it."""

    size: int
    mtime_ns: int
    inode: int


def source_stat(stat: os.stat_result) -> SourceStat:
    """Return what identifies a source's content."""
    return SourceStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def target_stat(stat: os.stat_result) -> TargetStat:
    """Return what identifies a cache file's content."""
    return TargetStat(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Entry(NamedTuple):
    """What a list of captions says of one image.

    Attributes:
        name: the image's, as the list has it.
        caption: None where there is none.
        tags: None where there are none.
    """

    name: str
    caption: str | None
    tags: str | None


class Listed:
    """The entries of one list of captions, on disk: a list may be larger than memory.

    Args:
        database: that holds them.
        number: of the list there.
        count: how many entries it has.
    """

    def __init__(self, database: sqlite3.Connection, number: int, count: int) -> None:
        self._database = database
        self._number = number
        self.count = count

    def find(self, names: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of some names."""
        wanted = list(names)
        found: dict[str, Entry] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            marks = ",".join("?" * len(some))
            rows = self._database.execute(
                f"SELECT name, caption, tags FROM entries WHERE list = ? AND name IN ({marks})",  # noqa: S608
                (self._number, *some),
            )
            found.update((row[0], Entry(*row)) for row in rows)
        return found

    def names(self) -> Iterator[str]:
        """Yield all names, in order."""
        rows = self._database.execute(
            "SELECT name FROM entries WHERE list = ? ORDER BY name", (self._number,)
        )
        return (str(row[0]) for row in rows)


def _connect(place: str) -> sqlite3.Connection:
    database = sqlite3.connect(place, timeout=1, isolation_level=None)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (*_OLDER, _VERSION):
            raise sqlite3.DatabaseError("written by another version")
        if version != _VERSION:
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.Error:
        database.close()
        raise
    return database


class Memo:
    """A dictionary on disk, used as a context manager; what was learnt is written at the end.

    Args:
        path: the SQLite file; None keeps everything in memory.

    Attributes:
        is_new: whether it knew no source when it was opened: it was deleted, or never was.
    """

    def __init__(self, path: Path | None) -> None:
        self._database = self._open(path)
        self.is_new = self.knows_nothing("sources")
        self._sources: list[tuple[object, ...]] = []
        self._gone: list[tuple[object, ...]] = []
        self._targets: list[tuple[object, ...]] = []
        self._media: list[tuple[object, ...]] = []
        self._pictures: list[tuple[object, ...]] = []
        self._texts: list[tuple[object, ...]] = []
        self._verdicts: list[tuple[object, ...]] = []
        self._receipts: list[tuple[object, ...]] = []
        self._rates: list[tuple[object, ...]] = []

    @staticmethod
    def _open(path: Path | None) -> sqlite3.Connection:
        if path is not None:
            for _ in range(2):
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    return _connect(str(path))
                except (sqlite3.OperationalError, OSError):
                    break  # locked, read-only, full: plan without it
                except sqlite3.DatabaseError:  # damaged, or of another version
                    with contextlib.suppress(OSError):
                        path.unlink()
        return _connect(":memory:")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.save()
        self._database.close()

    def save(self) -> None:
        """Write what was learnt; a memo that cannot be written is left as it is."""
        work = [
            ("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?, ?)", self._sources),
            ("DELETE FROM targets WHERE path = ?", self._gone),
            ("INSERT OR REPLACE INTO targets VALUES (?, ?, ?, ?, ?)", self._targets),
            ("INSERT OR REPLACE INTO media VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._media),
            ("INSERT OR REPLACE INTO pictures VALUES (?, ?, ?, ?)", self._pictures),
            ("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", self._texts),
            ("INSERT OR REPLACE INTO verdicts VALUES (?, ?, unixepoch())", self._verdicts),
            ("INSERT OR REPLACE INTO receipts VALUES (?)", self._receipts),
            (
                "INSERT INTO rates VALUES (?, ?, ?, ?, 1) ON CONFLICT DO UPDATE SET "
                # What a past job weighs is halved by each that follows.
                "targets = targets * 0.5 + excluded.targets, "
                "seconds = seconds * 0.5 + excluded.seconds, "
                "starting = starting * 0.5 + excluded.starting, "
                "jobs = jobs * 0.5 + 1",
                self._rates,
            ),
        ]
        if not any(rows for _, rows in work):
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, rows in work:
                self._database.executemany(statement, rows)
            self._database.execute("DELETE FROM verdicts WHERE asked < unixepoch() - 7776000")
            self._database.execute("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            return
        for _, rows in work:
            rows.clear()

    def _below(self, table: str, columns: str, folder: str) -> list[tuple[object, ...]]:
        # Paths below a folder are one range of the primary key: "/" is followed by "0".
        try:
            return self._database.execute(
                f"SELECT path, {columns} FROM {table} WHERE path > ? AND path < ?",  # noqa: S608
                (f"{folder}/", f"{folder}0"),
            ).fetchall()
        except sqlite3.Error:
            return []

    def sources_below(self, folder: str) -> dict[str, tuple[SourceStat, str]]:
        """Return stat and digest of every known source below a folder."""
        rows = self._below("sources", "size, mtime_ns, ctime_ns, inode, digest", folder)
        return {row[0]: (row[1:5], row[5]) for row in rows}  # type: ignore[misc]

    def targets_below(self, folder: str) -> dict[str, tuple[TargetStat, str]]:
        """Return stat and key of every known cache file below a folder."""
        rows = self._below("targets", "size, mtime_ns, inode, key", folder)
        return {row[0]: (row[1:4], row[4]) for row in rows}  # type: ignore[misc]

    def media_below(self, folder: str) -> dict[str, tuple[SourceStat, Media]]:
        """Return stat, size and length of every known image and video below a folder."""
        columns = "size, mtime_ns, ctime_ns, inode, width, height, frames"
        rows = self._below("media", columns, folder)
        return {row[0]: (row[1:5], Media(*row[5:])) for row in rows}  # type: ignore[misc, arg-type]

    def texts_below(self, folder: str) -> dict[str, tuple[SourceStat, str]]:
        """Return stat and content of every known file of text below a folder."""
        rows = self._below("texts", "size, mtime_ns, ctime_ns, inode, text", folder)
        return {row[0]: (row[1:5], row[5]) for row in rows}  # type: ignore[misc]

    def learn_text(self, path: str, stat: SourceStat, text: str) -> None:
        """Remember what a file of text holds."""
        self._texts.append((path, *stat, text))

    def listed(self, path: str, stat: SourceStat) -> Listed | None:
        """Return the entries of a list of captions of this stat, where it was read before."""
        try:
            row = self._database.execute(
                "SELECT size, mtime_ns, ctime_ns, inode, rowid, entries FROM lists WHERE path = ?",
                (path,),
            ).fetchone()
        except sqlite3.Error:
            return None
        if row is None or row[:4] != stat:
            return None
        return Listed(self._database, row[4], row[5])

    def learn_list(self, path: str, stat: SourceStat, entries: Iterable[Entry]) -> Listed:
        """Keep the entries of a list of captions, each as soon as it comes; all of them or none.

        Where the memo cannot be written, a temporary file of the system holds them.

        Raises:
            whatever `entries` raises.
        """
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            database = _connect("")
            database.execute("BEGIN")
        try:
            old = database.execute("SELECT rowid FROM lists WHERE path = ?", (path,)).fetchone()
            if old is not None:
                database.execute("DELETE FROM entries WHERE list = ?", old)
            row = (path, *stat, 0)
            done = database.execute("INSERT OR REPLACE INTO lists VALUES (?, ?, ?, ?, ?, ?)", row)
            number = int(done.lastrowid or 0)
            database.executemany(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
                ((number, *entry) for entry in entries),
            )
            (count,) = database.execute(
                "SELECT count(*) FROM entries WHERE list = ?", (number,)
            ).fetchone()
            database.execute("UPDATE lists SET entries = ? WHERE rowid = ?", (count, number))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return Listed(database, number, count)

    def learn_media(self, path: str, stat: SourceStat, media: Media) -> None:
        """Remember an image's or a video's size and length."""
        self._media.append((path, *stat, *media))

    def pictures(self, contents: Iterable[str], *, upright: bool) -> dict[str, Size]:
        """Return the sizes of images, as far as they are known.

        Args:
            contents: digests of their files.
            upright: sizes of the images turned as their EXIF orientation says.
        """
        rows = self._each(
            "SELECT digest, width, height FROM pictures WHERE upright = ? AND digest",
            contents,
            int(upright),
        )
        return {row[0]: Size(*row[1:]) for row in rows}  # type: ignore[misc, arg-type]

    def knows_nothing(self, table: str, folder: str = "") -> bool:
        """Return whether one of the tables of files has no file, or none below a folder."""
        below = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")
        try:
            row = self._database.execute(
                f"SELECT 1 FROM {table} WHERE path > ? AND path < ? LIMIT 1",  # noqa: S608
                below,
            ).fetchone()
        except sqlite3.Error:
            return True
        return row is None

    def sources_of_size(self, sizes: Iterable[int]) -> Iterator[tuple[int, int, int, str]]:
        """Yield size, mtime (ns), inode and digest of every known source of some sizes."""
        statement = "SELECT size, mtime_ns, inode, digest FROM sources WHERE size"
        yield from self._each(statement, sizes)  # type: ignore[misc]

    def targets_of(self, keys: Iterable[str]) -> Iterator[tuple[str, int, str]]:
        """Yield path, size in bytes and key of every known cache file that bears one of some keys.

        Whether it is there still, only a look at it tells.
        """
        rows = self._each("SELECT path, size, key FROM targets WHERE key", keys)
        return ((str(path), int(str(size)), str(key)) for path, size, key in rows)

    def forget_targets(self, paths: Iterable[str]) -> None:
        """Forget cache files that are gone."""
        self._gone += [(path,) for path in paths]

    def learn_picture(self, content: str, picture: Picture) -> None:
        """Remember the size of an image, by the digest of its file."""
        width, height, upright = picture
        self._pictures.append((content, int(upright), width, height))

    def _each(
        self, statement: str, wanted: Iterable[object], *first: object
    ) -> Iterator[tuple[object, ...]]:
        """Yield the rows of a query `... IN (...)` for any number of values, some at a time."""
        values = list(wanted)
        for start in range(0, len(values), _AT_ONCE):
            some = values[start : start + _AT_ONCE]
            marks = ",".join("?" * len(some))
            with contextlib.suppress(sqlite3.Error):
                yield from self._database.execute(f"{statement} IN ({marks})", (*first, *some))

    def learn_source(self, path: str, stat: SourceStat, content: str) -> None:
        """Remember a source's digest."""
        self._sources.append((path, *stat, content))

    def learn_target(self, path: str, stat: TargetStat, key: str) -> None:
        """Remember the key in a cache file's header."""
        self._targets.append((path, *stat, key))

    def known_digest(self, path: str, stat: SourceStat) -> str | None:
        """Return the digest of a source of this stat, where it has been read before."""
        try:
            row = self._database.execute("SELECT * FROM sources WHERE path = ?", (path,)).fetchone()
        except sqlite3.Error:
            return None
        return str(row[5]) if row is not None and row[1:5] == stat else None

    def digest_of_file(self, path: Path) -> str:
        """Return a file's digest, reading it only if its stat is new.

        Raises:
            OSError: it cannot be read.
        """
        name = str(path)
        stat = source_stat(path.stat())
        if known := self.known_digest(name, stat):
            return known
        content = digest.of_file(path)
        self.learn_source(name, stat, content)
        return content

    def verdict(self, question: str) -> str | None:
        """Return the answer given to a question (a digest of all it depends on), if any."""
        try:
            row = self._database.execute(
                "SELECT answer FROM verdicts WHERE question = ?", (question,)
            ).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None else str(row[0])

    def learn_verdict(self, question: str, answer: str) -> None:
        """Remember the answer to a question."""
        self._verdicts.append((question, answer))

    def rate(self, name: str) -> Rate | None:
        """Return how fast past jobs of a name (kind and model) were, if there were any."""
        try:
            row = self._database.execute(
                "SELECT targets / seconds, starting / jobs FROM rates WHERE name = ?", (name,)
            ).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None else Rate(*row)

    def learn_rate(self, name: str, targets: int, seconds: float, starting: float) -> None:
        """Remember how fast a job was; later ones weigh more.

        Args:
            name: kind and model.
            targets: that it encoded; of none, nothing is learnt.
            seconds: that this took.
            starting: seconds before.
        """
        if targets > 0 and seconds > 0:
            self._rates.append((name, targets, seconds, starting))

    def known_receipts(self) -> set[str]:
        """Return the names of the receipts that were taken in."""
        try:
            return {str(row[0]) for row in self._database.execute("SELECT name FROM receipts")}
        except sqlite3.Error:
            return set()

    def learn_receipt(self, name: str) -> None:
        """Remember that a receipt was taken in."""
        self._receipts.append((name,))
