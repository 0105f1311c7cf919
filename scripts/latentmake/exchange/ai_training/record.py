"""Which file of another program was adopted for which content of an item.

A cache file's header says so too, until an edit has it encoded anew. This record stays: should the
item be edited again, the other program's file, still of the first content, is not taken for it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from latentmake.errors import storage_error

__all__ = ["Record"]

_DIGITS = 20  # of each digest: enough to tell them apart


class Record:
    """A text file to which lines are added: name, digest of the file, digest of the source.

    A line is there before the cache file that it is about.

    Args:
        path: of the file, which may be missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], set[str]] = {}
        data = path.read_bytes() if path.is_file() else b""
        for line in data.decode("utf-8", "replace").splitlines():
            name, *digests = line.split("\t")
            if len(digests) == 2:
                self._known.setdefault((name, digests[0]), set()).add(digests[1])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if data and not data.endswith(b"\n"):
                self._file.write(b"\n")  # a killed writer's last line
        except OSError as error:
            raise storage_error(error, path) or error from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def is_of_other(self, name: str, file: str, source: str) -> bool:
        """Whether a file was adopted before, for other content than this and not for this.

        Args:
            name: of the file.
            file: digest of its bytes.
            source: digest of what the item holds now.
        """
        known = self._known.get((name, file[:_DIGITS]), set())
        return bool(known) and source[:_DIGITS] not in known

    def note(self, name: str, file: str, source: str) -> None:
        """Note that a file is adopted for some content.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        key, value = (name, file[:_DIGITS]), source[:_DIGITS]
        with self._lock:
            if value in self._known.get(key, set()):
                return
            try:
                self._file.write("\t".join([*key, f"{value}\n"]).encode())
            except OSError as error:
                raise storage_error(error, self._path) or error from None
            self._known.setdefault(key, set()).add(value)
