"""SHA-256 digests of bytes, files and plain values.

SHA-256 throughout, so that `sha256sum` on a source gives the very digest in a cache file's header.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from latentmake.regular import open_regular

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


def of_file(path: Path, *, quiet: bool = False) -> str:
    """Return the SHA-256 of a file's content; a large one gets a progress bar unless `quiet`.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe, a socket or a device.
    """
    try:
        file, size = open_regular(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with file:
        if quiet or size < _LONG:
            return hashlib.file_digest(file, "sha256").hexdigest()
        from latentmake.progress import Progress

        found = hashlib.sha256()
        bar = Progress(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True)
        with bar as progress:
            while data := file.read(1 << 24):
                found.update(data)
                progress.update(len(data))
        return found.hexdigest()
