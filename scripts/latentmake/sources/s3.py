"""Datasets on an S3 server: folders are listed and objects read like files on disk.

A listing tells size, time and ETag of every object, which stand for a stat; so whatever knows
files by their stats knows objects too, and none is fetched twice. Objects are read into memory and
never written to disk. boto3 is imported where an `s3://` path occurs, and nowhere else.

boto3 itself rather than s3fs, whose aiobotocore allows a few older releases of botocore alone, or
obstore, where one object with an odd name (`a//b`, `a/../b`) makes the listing fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from latentmake import digest
from latentmake.errors import DatasetError, SourceError, StorageError, UserError
from latentmake.files.paths import REMOTE
from latentmake.index.memo import SourceStat

if TYPE_CHECKING:
    from datetime import datetime

Entry = tuple[str, int, int, int, int]
"""Path below the root, then size, mtime_ns, ctime_ns and inode."""

SIDE_BY_SIDE = 16
"""Objects read at once: nearly all of their time is waiting."""

_PLUGIN = "SNAKEMAKE_STORAGE_S3_"
_TOLD = {
    "endpoint_url": "ENDPOINT_URL",
    "region_name": "REGION",
    "aws_access_key_id": "ACCESS_KEY",
    "aws_secret_access_key": "SECRET_KEY",
    "aws_session_token": "TOKEN",
}
_ATTEMPTS = 3  # at reading a body whose connection broke off, which botocore does not repeat
_CONNECT_SECONDS = 10
_LOOKS_LONG = 100  # objects whose reading is worth a progress bar
_GONE = ("NoSuchKey", "NotFound", "404")
_DENIED = ("AccessDenied", "Forbidden", "403", "AllAccessDisabled")
_lock = threading.Lock()


def stat_of(size: int, modified: datetime, etag: str) -> SourceStat:
    """Return a stand-in for an object's stat.

    Listings tell milliseconds, headers do not: whole seconds count. The digest of the ETag, in
    quotes or not, stands for the inode.
    """
    mark = etag.removeprefix("W/").strip('"')
    number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8]) >> 1  # SQLite's: 63 bits
    return SourceStat(size, int(modified.timestamp()) * 1_000_000_000, 0, number)


def listing(folder: str, where: str) -> list[Entry]:
    """List all objects below a normalized folder; names that begin with a dot are skipped.

    Raises:
        DatasetError: bucket or folder are missing, or it cannot be read; `where` is the key that
            names it.
    """
    bucket, _, prefix = folder.removeprefix(REMOTE).partition("/")
    prefix = f"{prefix}/" if prefix else ""
    with _one_line(folder, where):
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        entries = [
            (each["Key"][len(prefix) :], *stat_of(each["Size"], each["LastModified"], each["ETag"]))
            for page in pages
            for each in page.get("Contents", ())
        ]
    if not entries:
        what = f"the dataset folder {folder} does not exist, or no object is in it"
        raise DatasetError(what, where=where, hint="correct the path")
    return [each for each in entries if _names_a_file(each[0])]


def _names_a_file(path: str) -> bool:
    return bool(path) and not (path.endswith("/") or path.startswith(".") or "/." in path)


def read(path: str) -> tuple[bytes, SourceStat]:
    """Fetch an object: its bytes, and its stat as a listing of this version tells it.

    Raises:
        SourceError: it is gone, or this user may not read it.
        StorageError: the server cannot be reached, or refuses everything.
    """
    bucket, _, key = path.removeprefix(REMOTE).partition("/")
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    broken = (HTTPClientError, IncompleteReadError, ResponseStreamingError)
    with _one_line(path):
        for left in reversed(range(_ATTEMPTS)):
            answer = _client().get_object(Bucket=bucket, Key=key)
            try:
                data = answer["Body"].read()
                break
            except broken:
                if not left:
                    raise
    return data, stat_of(len(data), answer["LastModified"], answer["ETag"])


def digests(
    files: Sequence[tuple[str, SourceStat]],
) -> Iterator[tuple[str, SourceStat] | SourceError]:
    """Yield digest and stat of objects in their order, many fetched at a time.

    Of an object that is gone or may not be read, the error is yielded.
    """
    from latentmake.progress import Progress

    def digested(file: tuple[str, SourceStat]) -> tuple[str, SourceStat] | SourceError:
        try:
            data, stat = read(file[0])
        except SourceError as error:
            return error
        return digest.of_bytes(data), stat

    quiet = len(files) < _LOOKS_LONG
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = pool.map(digested, files)
        yield from Progress(
            found, total=len(files), desc="reading objects", unit="object", disable=quiet
        )


def _client() -> Any:
    """Return the client of this process, which several threads may use."""
    with _lock:
        return _made_client()


@cache
def _made_client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise DatasetError(
            "the Python package boto3 is missing",
            where="s3://",
            hint="install it: pip install -r envs/requirements-s3.lock",
        ) from None
    # What Snakemake's storage plugin is told counts here too; boto3 finds the rest by itself.
    told = {name: os.environ.get(f"{_PLUGIN}{each}") or None for name, each in _TOLD.items()}
    settings = Config(
        retries={"mode": "standard"},
        connect_timeout=_CONNECT_SECONDS,
        max_pool_connections=SIDE_BY_SIDE,
    )
    return boto3.session.Session().client("s3", config=settings, **told)


@contextlib.contextmanager
def _one_line(path: str, where: str = "") -> Iterator[None]:
    """Turn whatever boto3 raises into one line: about the key `where`, or about an object."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its exceptions have no root in common but this
        code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
        if code in _GONE and not where:
            raise SourceError("is gone since it was listed", where=path, hint="run again") from None
        hint = "check the address, AWS_ENDPOINT_URL_S3, and your credentials (`aws configure`)"
        kind: type[UserError] = DatasetError if where else StorageError
        if code in _DENIED:
            kind = DatasetError if where else SourceError
            hint = "give these credentials permission to list and read it"
        what = f"cannot be read ({error})"
        raise kind(f"{path} {what}" if where else what, where=where or path, hint=hint) from None
