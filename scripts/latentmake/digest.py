"""SHA-256 digests of bytes, files and plain values.

SHA-256 throughout, so that `sha256sum` on a source gives the very digest in a cache file's header.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["canonical", "of_bytes", "of_file", "of_lines", "of_value"]

_LONG = 4 << 30  # bytes: seconds of reading, which are worth a progress bar


def canonical(value: object) -> str:
    """Return the canonical JSON of a plain value: keys sorted, no spaces, no escapes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def of_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def of_value(value: object) -> str:
    """Return the SHA-256 of a plain value's canonical JSON."""
    return of_bytes(canonical(value).encode())


def of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines in the order given."""
    return of_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))


def of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, with a progress bar if it is large."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LONG:
            return hashlib.file_digest(file, "sha256").hexdigest()
        from latentmake.progress import Progress

        found = hashlib.sha256()
        bar = Progress(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True)
        with bar as progress:
            while data := file.read(1 << 24):
                found.update(data)
                progress.update(len(data))
        return found.hexdigest()
