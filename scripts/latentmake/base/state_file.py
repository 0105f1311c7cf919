"""State files, which one command writes and later commands read.

Orders, receipts, locks, records and indexes are state files. Users do not edit them, but a merge, a
sync, a crash or a full disk can damage them. `read_state` checks all of them. A damaged file is
named in a line and counts as missing, so the command that needs it writes a new one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake.base import atomic
from latentmake.base.errors import StorageError, first_line
from latentmake.base.regular import read_regular

_Content = TypeVar("_Content")
_MOST = 1 << 32  # largest size in bytes; an index of 10^7 items has half of it
_damaged: dict[str, str] = {}  # absolute path -> fault that this process has named


def read_state(
    path: Path,
    parse: Callable[[bytes], _Content],
    *,
    quiet: bool = False,
    advice: str = "Latentmake makes it anew",
) -> _Content | None:
    """Return the content of a state file; None if it is missing or damaged.

    Args:
        path: path of the file.
        parse: function that parses and checks the bytes. It raises a ValueError, such as
            pydantic's, that describes the fault.
        quiet: whether to write no line about a damaged file, because the caller does.
        advice: end of that line.
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
            sys.stderr.write(f"note: {path} is damaged ({fault}); {advice}\n")
    return content


class JsonFile(BaseModel):
    """A JSON file with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    quiet: ClassVar[bool] = False  # whether the caller reports a damaged file itself

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a file; None if it is missing or damaged."""
        return read_state(path, cls.model_validate_json, quiet=cls.quiet)

    def write(self, path: Path) -> None:
        """Write the file; raises StorageError."""
        atomic.write(path, (self.model_dump_json(indent=2) + "\n").encode())


def is_damaged(path: Path) -> bool:
    """Whether a file was damaged when this process last read it."""
    return os.path.abspath(path) in _damaged  # noqa: PTH100


def read_order(path: Path, parse: Callable[[bytes], _Content]) -> _Content:
    """Return the content of a file that the plan wrote for this job; raises StorageError."""
    try:
        return parse(read_regular(path, _MOST))
    except OSError as error:
        fault = error.strerror or "cannot be read"
    except (ValueError, RecursionError) as error:
        fault = _words(error)
    hint = "run the same command again, which writes it anew"
    raise StorageError(f"cannot be read ({fault})", where=path, hint=hint)


def _words(error: Exception) -> str:
    """Return a line with the fault of a file's content and its key."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"][:4]))[:80]
    return f"{place}: {first['msg']}" if place else first["msg"]
