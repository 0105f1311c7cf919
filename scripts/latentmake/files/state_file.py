"""Files of state: what one command writes for later ones, checked where it is read.

Orders, receipts, locks, records and indexes are files of state. No user writes them, but a merge, a
sync, a crash or a full disk damages them. `read_state` is the place where all of them are checked:
a damaged file is named in a line and counts as missing, so that whoever needs it makes it anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from latentmake.errors import StorageError, first_line
from latentmake.regular import read_regular

_Content = TypeVar("_Content")
_MOST = 1 << 32  # bytes of a file of state: an index of 10^7 items has half of them
_damaged: dict[str, str] = {}  # absolute path -> fault, of the files that this process named


def read_state(
    path: Path, parse: Callable[[bytes], _Content], *, quiet: bool = False
) -> _Content | None:
    """Return the content of a file of state; None where it is missing or damaged.

    Args:
        path: of the file.
        parse: reads and checks its bytes; a ValueError, such as pydantic's, says what is wrong.
        quiet: whether the caller names a damaged one.
    """
    place = os.path.abspath(path)  # noqa: PTH100 -- much faster
    try:
        content = parse(read_regular(path, _MOST))
    except (FileNotFoundError, NotADirectoryError):
        content, fault = None, ""
    except OSError as error:
        content, fault = None, f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        content, fault = None, _words(error)
    else:
        fault = ""
    if not fault:
        _damaged.pop(place, None)
    elif _damaged.get(place) != fault:
        _damaged[place] = fault
        if not quiet:
            sys.stderr.write(f"note: {path} is damaged ({fault}); Latentmake makes it anew\n")
    return content


def is_damaged(path: Path) -> bool:
    """Whether this process found a file damaged when it read it last."""
    return os.path.abspath(path) in _damaged  # noqa: PTH100


def read_order(path: Path, parse: Callable[[bytes], _Content]) -> _Content:
    """Return the content of a file that the plan has written for this job; raises StorageError."""
    try:
        return parse(read_regular(path, _MOST))
    except OSError as error:
        fault = error.strerror or "cannot be read"
    except (ValueError, RecursionError) as error:
        fault = _words(error)
    hint = "run the same command again, which writes it anew"
    raise StorageError(f"cannot be read ({fault})", where=path, hint=hint)


def _words(error: Exception) -> str:
    """Return in a line what is wrong with a file's content, and at which key."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"][:4]))[:80]
    return f"{place}: {first['msg']}" if place else first["msg"]
