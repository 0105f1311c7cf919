"""Reading of cache files for `verify_{run}`, by several threads."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np  # noqa: F401 -- else imported by the first file, as a part of its time
import xxhash  # noqa: F401

from latentmake.errors import CacheError
from latentmake.files import verified
from latentmake.files.cachefile import read_header

__all__ = ["Content", "Reading", "read", "read_all"]

_LEAST_THREADS = 2
_SHARE = 16 << 20  # bytes of the files that a thread is given at a time
_MOST = 256  # files likewise
_AHEAD = 8  # times as many shares as threads are read before what is faster is asked again
_REWRITTEN = "rewritten by another program"


class Reading(NamedTuple):
    """A file to read.

    Attributes:
        size: in bytes.
        key: that it should have; "" where that is unknown.
        source: digest that belongs to that key, as does `recipe`.
        may_be_zero: whether a sound file may hold zeros alone, as that of an empty caption.
    """

    path: str
    size: int
    key: str = ""
    source: str = ""
    recipe: str = ""
    may_be_zero: bool = True


class Content(NamedTuple):
    """A file that was read.

    Attributes:
        fault: what is wrong with the file itself; "" where nothing is.
        ours: whether its header says that it is one of ours.
        foreign: whether another program made it.
        unreadable: whether the system does not let it be read.
        gone: whether it has been removed since it was listed.
        key: of its header, as are `source` and `recipe`.
        summed: whether its header holds a checksum.
        doubt: what is odd about a file that is as it was written.
    """

    fault: str = ""
    ours: bool = False
    foreign: bool = False
    unreadable: bool = False
    gone: bool = False
    key: str = ""
    source: str = ""
    recipe: str = ""
    summed: bool = False
    doubt: str = ""


def read(file: Reading) -> Content:
    """Read a file, and check all that can be known without its source."""
    path, expected = file.path, verified.Expected(file.key, may_be_zero=file.may_be_zero)
    try:
        found = verified.verify(path, expected) if file.key else None
        if found is not None and found.damage is None and found.has_checksum:
            return Content("", True, False, False, False, *file[2:5], summed=True)
        return _examined(file, found)
    except FileNotFoundError:
        return Content("is a link that leads nowhere", gone=not os.path.lexists(path))
    except OSError as error:
        return Content(f"cannot be read ({error.strerror})", unreadable=True)


def _examined(file: Reading, found: verified.Checked | None) -> Content:
    """Read a file that is not known to be sound, or not to have a key."""
    try:
        header = read_header(file.path)
    except CacheError as error:
        fault = error.what if found is None or found.damage is None else found.damage
        foreign = fault.startswith(verified.FOREIGN) or _REWRITTEN in fault
        return Content(fault, foreign=foreign)
    # Whatever name it bears: is it sound as what its own header says?
    expected = verified.Expected(header.key, header.recipe, may_be_zero=file.may_be_zero)
    own = verified.verify(file.path, expected)
    fault, doubt = own.damage or "", ""
    if fault.startswith(verified.CONSTANT) and verified.corruption_of(file.path) is None:
        fault, doubt = "", fault
    return Content(
        fault,
        ours=True,
        key=header.key,
        source=header.source,
        recipe=header.recipe,
        summed=own.has_checksum,
        doubt=doubt,
    )


def read_all(files: Sequence[Reading], threads: int) -> Iterator[tuple[int, Content]]:
    """Yield the number of each file and its content.

    Reading and hashing let other threads run, and a network file system needs several at a time.
    But for small files at hand threads pass Python's lock to and fro, which takes some machines
    longer than reading: what was faster last decides for files of like size.

    Args:
        files: to read.
        threads: cores that may be used.
    """
    most = max(threads, _LEAST_THREADS)
    waiting = deque(_shares([*enumerate(files)]))
    pace: dict[tuple[int, bool], float] = {}  # seconds a byte
    with ThreadPoolExecutor(most) as pool:
        while waiting:
            kind = _kind(waiting[0])
            apart, together = pace.get((kind, False)), pace.get((kind, True))
            several = apart is not None and (together is None or together < apart)
            count = 1 if not several else most if together is None else _AHEAD * most
            taken = [waiting.popleft()]
            while waiting and len(taken) < count and _kind(waiting[0]) == kind:
                taken.append(waiting.popleft())
            began = time.monotonic()
            for found in pool.map(_read_share, taken):
                yield from found
            size = sum(each.size for share in taken for _, each in share)
            pace[kind, several] = (time.monotonic() - began) / max(size, 1)


_Share = list[tuple[int, Reading]]


def _kind(share: _Share) -> int:
    """Return a number that is the same for files of like size."""
    return (sum(each.size for _, each in share) // len(share)).bit_length()


def _shares(files: Sequence[tuple[int, Reading]]) -> Iterator[_Share]:
    share: _Share = []
    size = 0
    for number, each in files:
        share.append((number, each))
        size += each.size
        if size >= _SHARE or len(share) == _MOST:
            yield share
            share, size = [], 0
    if share:
        yield share


def _read_share(share: _Share) -> list[tuple[int, Content]]:
    return [(number, read(each)) for number, each in share]
