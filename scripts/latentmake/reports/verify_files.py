"""Reading of cache files for `verify_{run}`, by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from latentmake.errors import CacheError
from latentmake.files import verified
from latentmake.files.cachefile import read_header

__all__ = ["Content", "Reading", "read", "read_all"]

_LEAST_THREADS = 2
_SHARE = 16 << 20  # bytes of the files that a thread is given at a time
_MOST = 256  # files likewise
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

    Reading and hashing let other threads run; a network file system needs several at a time.

    Args:
        files: to read.
        threads: cores that may be used.
    """
    with ThreadPoolExecutor(max(threads, _LEAST_THREADS)) as pool:
        for found in pool.map(_read_share, _shares([*enumerate(files)])):
            yield from found


_Share = list[tuple[int, Reading]]


def _shares(files: Sequence[tuple[int, Reading]]) -> Iterator[_Share]:
    share: _Share = []
    size = 0
    for number, each in files:
        share.append((number, each))
        size += each.size
        if size >= _SHARE or len(share) == _MOST:
            yield share
            share, size = [], 0
    yield share


def _read_share(share: _Share) -> list[tuple[int, Content]]:
    return [(number, read(each)) for number, each in share]
