"""Reading a job's items: bytes and digests of their sources, and keys of their targets."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.inputs import Reading, stored_size
from latentmake.data import remote
from latentmake.data.item import CAPTION, IMAGE
from latentmake.errors import SourceError, unreadable
from latentmake.files import cachefile
from latentmake.files.workspace import is_remote
from latentmake.index.memo import source_stat
from latentmake.plan.orders import Order, Work, joined, placing_of, view_of


def read_ahead(
    order: Order, works: Sequence[Work], read: Callable[[Work], Reading], threads: int
) -> Iterator[Reading]:
    """Yield the readings of items in their order, few of which are made before they are taken."""
    at_once = 1
    if any(is_remote(each.item.source or "") for each in works):
        threads = max(threads, remote.SIDE_BY_SIDE // 2)  # they mostly wait
    elif order.kind == "text" and not any(each.item.controls for each in works):
        at_once = 16  # one takes less time than a thread to wake up, on a disk of this machine
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[list[Reading]]] = deque()
        try:
            for start in range(0, len(works), at_once):
                few = works[start : start + at_once]
                ahead.append(pool.submit(lambda few: [read(each) for each in few], few))
                if len(ahead) > 2 * threads:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def identify(order: Order, recipe: str, reading: Reading) -> None:
    """Read an item's files, and find the keys of its targets by what the files hold now.

    Of videos only digests are kept. What is noted of an image whose targets are not named by its
    size holds that, too. `recipe` is the digest of the targets' recipe.

    Raises:
        OSError: a file cannot be read.
        SourceError: one is damaged, or cannot be fetched.
    """
    item, settings, contents = reading.item, order.dataset_settings, list[str]()
    reading.data = (item.text or "").encode()
    for role, path, _ in item.read:
        data, content = _read(path, reading.sources, keep=not order.cuts_clips)
        contents.append(content)
        if role in (IMAGE, CAPTION):
            reading.data = data
        else:
            reading.others[path] = data
    reading.content = joined(item, contents)
    if item.media is not None:
        reading.size = stored_size(item)
    elif order.kind == "latents" and item.source is not None:
        from latentmake.caches.pixels.plain import upright_size  # of the layout that has no `media`

        reading.size = upright_size(reading.data, item.source, settings)
        reading.sources[item.source] += [*reading.size, settings.exif_rotation]
    for target in reading.work.targets:
        view = view_of(order.layout, settings, item, target, reading.size)
        reading.keys[target] = key = cachefile.target_key(reading.content, recipe, view)
        if placing := placing_of(order.layout, settings, item, target, reading.size, view):
            reading.placing[key] = placing


def _read(path: str, sources: dict[str, list[Any]], *, keep: bool) -> tuple[bytes, str]:
    """Return a file's bytes, none unless `keep`, and its digest; note its stat in `sources`.

    Where no bytes are kept, what `sources` knows already is believed.
    """
    if not keep and path in sources:
        return b"", str(sources[path][-1])
    if is_remote(path):
        if not keep:
            hint = "copy the videos to a disk"
            raise SourceError("is a video at a URL, which cannot be read", where=path, hint=hint)
        data, stat = remote.read(path)
        content = digest.of_bytes(data)
    else:
        with Path(path).open("rb") as file:
            stat = source_stat(os.fstat(file.fileno()))
            data = file.read() if keep else b""
            content = (
                digest.of_bytes(data) if keep else hashlib.file_digest(file, "sha256").hexdigest()
            )
    sources[path] = [*stat, content]
    return data, content


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
