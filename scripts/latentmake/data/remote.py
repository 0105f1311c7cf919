"""List and read datasets at a URL (`s3://`, `gs://`, `hf://datasets/`) with fsspec.

A listing has the size, the time and the ETag (or a similar mark of the content) of every file.
They take the place of a stat, so that an unchanged file is not fetched twice. Files are read into
memory and never written to disk. fsspec and its file systems are imported only if a URL occurs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from latentmake.base.digest import SourceStat
from latentmake.base.errors import DatasetError, SourceError, StorageError, UserError
from latentmake.data.item import Entry

SIDE_BY_SIDE = 16
"""Number of files to read in parallel: a thread spends nearly all of its time waiting."""

_MARKS = ("ETag", "etag", "blob_id")  # keys of a mark of the content: S3, Google, Hugging Face
_TIMES = ("LastModified", "mtime", "created")
_OPTIONS = {"s3": {"max_concurrency": 1}}  # one request a file: parts cannot come from two versions


def stat_of(info: Mapping[str, Any]) -> SourceStat:
    """Return the stat to use for a remote file, made from fsspec's information about it.

    The time is rounded down to seconds, because listings have milliseconds and headers do not. The
    inode is a digest of the ETag without quotes or, if there is none, of the exact time.
    """
    time = next((info[key] for key in _TIMES if info.get(key) is not None), 0)
    time = time.timestamp() if isinstance(time, datetime) else time
    mark = str(next((info[key] for key in _MARKS if info.get(key)), time))
    mark = mark.removeprefix("W/").strip('"')
    number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8]) >> 1  # SQLite has 63 bits
    seconds = int(time) if isinstance(time, int | float) else 0
    return SourceStat(int(info["size"]), seconds * 1_000_000_000, 0, number)


def listing(folder: str, where: str) -> list[Entry]:
    """List all files below a URL, except hidden ones.

    Args:
        folder: URL without a slash at its end.
        where: key of the configuration that has the URL, for messages.

    Raises:
        DatasetError: the folder is missing, empty or unreadable.
    """
    with _one_line(folder, where):
        listed = _file_system(folder).find(folder, detail=True)
    start = len(folder.partition("://")[2]) + 1
    entries = [(name.lstrip("/")[start:], info) for name, info in listed.items()]
    if not any(path for path, _ in entries):
        what = f"the dataset folder {folder} does not exist, or no file is in it"
        raise DatasetError(what, where=where, hint="correct the path")
    return [
        (path, *stat_of(info))
        for path, info in entries
        if path and not (path.endswith("/") or path.startswith(".") or "/." in path)
    ]


def read(url: str) -> tuple[bytes, SourceStat]:
    """Fetch a file: its bytes, and its stat in the form of a listing.

    The stat is fetched first. If the file changes in between, the old stat is stored with the new
    bytes, and the file is read again later.

    Raises:
        SourceError: the file is gone, or these credentials may not read it.
        StorageError: the server cannot be reached, or refuses every request.
    """
    with _one_line(url):
        files = _file_system(url)
        stat = stat_of(files.info(url))
        return files.cat_file(url), stat


def contents(urls: Sequence[str], value: Callable[[bytes, str], str]) -> Iterator[str | None]:
    """Read files in parallel and yield a value of each, in order.

    Args:
        urls: URLs of the files.
        value: function that computes the value from the bytes and the URL.

    Yields:
        The value; None if the file is gone, or `value` raises a SourceError.
    """
    from latentmake.base.progress import Progress

    def made(url: str) -> str | None:
        with contextlib.suppress(SourceError):
            return value(read(url)[0], url)
        return None

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        values = pool.map(made, urls)
        yield from Progress(values, total=len(urls), desc="reading", unit="file")


_INSTALL = "install it: pip install -r envs/requirements-remote.lock"


def _file_system(url: str) -> Any:
    """Return the file system of a URL; it is safe to use from several threads."""
    import fsspec

    protocol = url.partition("://")[0]
    # Without the cache of listings, which would hide changes of files.
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, **_OPTIONS.get(protocol, {}))
    except ImportError as error:
        what = f"the Python package for {protocol}:// is missing ({error})"
        raise DatasetError(what, where="datasets", hint=_INSTALL) from None


@contextlib.contextmanager
def _one_line(url: str, where: str = "") -> Iterator[None]:
    """Turn any exception into a UserError of one line.

    Args:
        url: URL of the file or folder.
        where: key of the configuration that names the folder; "" for a file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # errors of servers have no other base class in common
        if isinstance(error, FileNotFoundError) and not where:
            raise SourceError("is gone since it was listed", where=url, hint="run again") from None
        hint = "check the address and your credentials"
        kind: type[UserError] = DatasetError if where else StorageError
        if isinstance(error, PermissionError):
            kind = DatasetError if where else SourceError
            hint = "give these credentials permission to list and read it"
        what = f"cannot be read ({' '.join(str(error).split()) or type(error).__name__})"
        raise kind(f"{url} {what}" if where else what, where=where or url, hint=hint) from None
