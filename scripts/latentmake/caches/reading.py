"""Reading the sources of a job's items: bytes of images and captions, digests of videos."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.inputs import Sample
from latentmake.data import remote
from latentmake.data.item import Item
from latentmake.errors import SourceError
from latentmake.files.paths import is_remote
from latentmake.index.memo import source_stat
from latentmake.plan.orders import Work
from latentmake.plan.target import Target


@dataclass
class Reading:
    """Result of reading one item.

    Attributes:
        work: the item and its targets.
        content: digest of its source; "" until it is read.
        keys: of its targets that are not fresh.
        missing: targets still to encode, with their keys.
        samples: inputs for these.
        kept: number of fresh targets.
        fault: what is wrong with the source, in a line.
        sources: path -> stat and digest of each file that was read.
        placing: key -> settings that placed it, as its header has them, where these are unusual.
    """

    work: Work
    content: str = ""
    keys: dict[Target, str] = field(default_factory=dict)
    missing: dict[Target, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    kept: int = 0
    fault: str | None = None
    sources: dict[str, list[Any]] = field(default_factory=dict)
    placing: dict[str, str] = field(default_factory=dict)

    @property
    def item(self) -> Item:
        """The item."""
        return self.work.item


def read_ahead(
    items: Sequence[Work],
    read: Callable[[Work], Reading],
    threads: int,
    *,
    at_once: int = 1,
) -> Iterator[Reading]:
    """Yield the readings of items in their order, few of which are made before they are taken.

    A thread takes `at_once` of them.
    """
    some = (items[start : start + at_once] for start in range(0, len(items), at_once))
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[list[Reading]]] = deque()
        try:
            for few in some:
                ahead.append(pool.submit(lambda few: [*map(read, few)], few))
                if len(ahead) > 2 * threads:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read_source(path: str, sources: dict[str, list[Any]]) -> tuple[bytes, str]:
    """Return the bytes of a source and their digest; note its stat in `sources`.

    Raises:
        OSError: it cannot be read.
        SourceError: it cannot be fetched.
    """
    if is_remote(path):
        data, stat = remote.read(path)
    else:
        with Path(path).open("rb") as file:
            stat = source_stat(os.fstat(file.fileno()))
            data = file.read()
    content = digest.of_bytes(data)
    sources[path] = [*stat, content]
    return data, content


def digest_source(path: str, sources: dict[str, list[Any]]) -> str:
    """Return the digest of a source on a disk, of whose bytes few are in memory; note its stat.

    What `sources` knows already is believed.

    Raises:
        OSError: it cannot be read.
        SourceError: it is at a URL.
    """
    if path in sources:
        return str(sources[path][-1])
    if is_remote(path):
        hint = "copy the videos to a disk"
        raise SourceError("is a video at a URL, which cannot be read", where=path, hint=hint)
    with Path(path).open("rb") as file:
        stat = source_stat(os.fstat(file.fileno()))
        content = hashlib.file_digest(file, "sha256").hexdigest()
    sources[path] = [*stat, content]
    return content


def read_others(
    paths: Iterable[str], sources: dict[str, list[Any]], *, digests_alone: bool
) -> tuple[tuple[bytes, ...], list[str]]:
    """Return bytes and digests of the controls or layers of an item.

    With `digests_alone` no bytes are. Errors are those of `read_source`.
    """
    if digests_alone:
        return (), [digest_source(path, sources) for path in paths]
    found = [read_source(path, sources) for path in paths]
    return tuple(data for data, _ in found), [content for _, content in found]


def refuse_changed(paths: Iterable[str], sources: dict[str, list[Any]]) -> None:
    """Refuse files that are no longer those whose stat was noted.

    Raises:
        SourceError: one was changed meanwhile, or is gone.
    """
    for path in paths:
        try:
            now = source_stat(Path(path).stat())
        except OSError as error:
            raise unreadable(error, path) from None
        size, mtime_ns, _, inode, *_ = sources[path]
        if (now.size, now.mtime_ns, now.inode) != (size, mtime_ns, inode):
            hint = "run the same command again when it is complete"
            raise SourceError("was changed while it was read", where=path, hint=hint)


def unreadable(error: OSError, place: str) -> SourceError:
    """Return the error for a file that cannot be read."""
    return SourceError(
        f"cannot be read ({error.strerror})",
        where=error.filename or place,
        hint="check that the file exists and is readable",
    )
