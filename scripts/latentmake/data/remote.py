"""Datasets at a URL, such as `s3://`, `gs://` or `hf://datasets/`: listed and read by fsspec.

A listing has size, time and ETag (or another mark of the content) of every file, which stand for
the stat of a file on disk, so that no file is fetched twice. Files are read into memory and never
written to disk. fsspec and its file systems are imported where a URL occurs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from latentmake import digest
from latentmake.data.item import Entry
from latentmake.digest import SourceStat
from latentmake.errors import DatasetError, SourceError, StorageError, UserError

SIDE_BY_SIDE = 16
"""Files read at once: nearly all of their time is waiting."""

_MARKS = ("ETag", "etag", "blob_id")  # of a content, for S3, Google and Hugging Face
_TIMES = ("LastModified", "mtime", "created")
_OPTIONS = {"s3": {"max_concurrency": 1}}  # one request for a file: its bytes are of one version


def stat_of(info: Mapping[str, Any]) -> SourceStat:
    """Return a stand-in for the stat of a file, from what its file system says about it.

    Listings have milliseconds and headers do not, so whole seconds count. The digest of the ETag,
    in quotes or not, stands for the inode; without an ETag that of the exact time.
    """
    time = next((info[key] for key in _TIMES if info.get(key) is not None), 0)
    time = time.timestamp() if isinstance(time, datetime) else time
    mark = str(next((info[key] for key in _MARKS if info.get(key)), time))
    mark = mark.removeprefix("W/").strip('"')
    number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8]) >> 1  # SQLite's: 63 bits
    seconds = int(time) if isinstance(time, int | float) else 0
    return SourceStat(int(info["size"]), seconds * 1_000_000_000, 0, number)


def listing(folder: str, where: str) -> list[Entry]:
    """List all files below a URL without a slash at its end, but those with a hidden name.

    Raises:
        DatasetError: the folder is missing, empty or unreadable; `where` is the key that names it.
    """
    with _one_line(folder, where):
        found = _file_system(folder).find(folder, detail=True)
    start = len(folder.partition("://")[2]) + 1
    entries = [(name.lstrip("/")[start:], info) for name, info in found.items()]
    if not any(path for path, _ in entries):
        what = f"the dataset folder {folder} does not exist, or no file is in it"
        raise DatasetError(what, where=where, hint="correct the path")
    return [
        (path, *stat_of(info))
        for path, info in entries
        if path and not (path.endswith("/") or path.startswith(".") or "/." in path)
    ]


def read(url: str) -> tuple[bytes, SourceStat]:
    """Fetch a file: its bytes, and its stat as a listing has it.

    The stat is never newer than the bytes, so that a file which changes meanwhile is read again.

    Raises:
        SourceError: it is gone, or this user may not read it.
        StorageError: the server cannot be reached, or refuses everything.
    """
    with _one_line(url):
        files = _file_system(url)
        stat = stat_of(files.info(url))
        return files.cat_file(url), stat


def contents(
    urls: Sequence[str], value: Callable[[bytes, str], str] = lambda data, _: digest.of_bytes(data)
) -> Iterator[str | None]:
    """Yield values of files in their order, by default digests of their bytes.

    `value` gets the bytes and the URL; None stands for a file that is gone, or that it refuses.
    """
    from latentmake.progress import Progress

    def made(url: str) -> str | None:
        with contextlib.suppress(SourceError):
            return value(read(url)[0], url)
        return None

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = pool.map(made, urls)
        yield from Progress(found, total=len(urls), desc="reading", unit="file")


_INSTALL = "install it: pip install -r envs/requirements-remote.lock"


def _file_system(url: str) -> Any:
    """Return the file system of a URL, which several threads may use."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, **_OPTIONS.get(protocol, {}))
    except ImportError as error:
        what = f"the Python package for {protocol}:// is missing ({error})"
        raise DatasetError(what, where="datasets", hint=_INSTALL) from None


@contextlib.contextmanager
def _one_line(url: str, where: str = "") -> Iterator[None]:
    """Turn any exception into one line: about the key `where`, or about a file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # those of servers have no root in common but this
        if isinstance(error, FileNotFoundError) and not where:
            raise SourceError("is gone since it was listed", where=url, hint="run again") from None
        hint = "check the address and your credentials"
        kind: type[UserError] = DatasetError if where else StorageError
        if isinstance(error, PermissionError):
            kind = DatasetError if where else SourceError
            hint = "give these credentials permission to list and read it"
        what = f"cannot be read ({' '.join(str(error).split()) or type(error).__name__})"
        raise kind(f"{url} {what}" if where else what, where=where or url, hint=hint) from None
