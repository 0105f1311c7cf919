"""Record of adopted files, and of the content that each was adopted for.

A cache file's header says so too, until an edit has it encoded again. This record remains: after a
further edit the other program's file, still of the first content, is not adopted for the new one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path

from latentmake.errors import storage_error

_DIGITS = 20  # of each digest


class Record(AbstractContextManager["Record"]):
    """A text file of lines: name, digest of the file, digest of the source, with tabs between.

    A line is written before its cache file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        data = path.read_bytes() if path.is_file() else b""
        for line in data.decode("utf-8", "replace").splitlines():
            name, *digests = line.split("\t")
            if len(digests) == 2:
                self._known[name, digests[0]].add(digests[1])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if data and not data.endswith(b"\n"):
                self._file.write(b"\n")  # a killed writer's last line
        except OSError as error:
            raise storage_error(error, path) or error from None

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_of_other(self, name: str, file: str, source: str) -> bool:
        """Whether a file of this digest was adopted for other content and never for this."""
        with self._lock:
            known = self._known.get((name, file[:_DIGITS]), set())
            return bool(known) and source[:_DIGITS] not in known

    def note(self, name: str, file: str, source: str) -> None:
        """Note that a file is adopted for some content.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        file, source = file[:_DIGITS], source[:_DIGITS]
        with self._lock:
            if source in self._known[name, file]:
                return
            try:
                self._file.write(f"{name}\t{file}\t{source}\n".encode())
            except OSError as error:
                raise storage_error(error, self._path) or error from None
            self._known[name, file].add(source)
