"""Errors of the package: a user's mistake (one line, no traceback) or a fault of ours."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Callable, Collection, Iterable

_LONGEST = 80  # characters of a value in a message
_LONGEST_LINE = 490  # characters of a message; `error: ` may stand before it
_LONGEST_PART = 370  # characters of several faults in a message


class LatentmakeError(Exception):
    """An error that this package raises on purpose."""


class UserError(LatentmakeError):
    """A user's mistake: what is wrong, where (file, folder or key), and the hint to repair it."""

    def __init__(self, what: str, *, where: str | os.PathLike[str] = "", hint: str = "") -> None:
        self.what = what
        self.where = os.fspath(where)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        line = " ".join(f"{place}{self.what}{hint}".split())
        # A terminal would carry out an escape sequence of a file's name.
        line = "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in line)
        if len(line) > _LONGEST_LINE:
            half = _LONGEST_LINE // 2 - 3
            line = f"{line[:half]} ... {line[-half:]}"
        return line


class ConfigError(UserError):
    """An invalid configuration."""


class DatasetError(UserError):
    """A dataset as a whole is missing, empty or unreadable."""


class SourceError(UserError):
    """One image or caption is damaged, missing or unreadable."""


class ModelError(UserError):
    """Weights or a tokenizer are missing, incomplete or of another kind."""


class CacheError(UserError):
    """A cache file is damaged, foreign, or holds values that no encoder should give."""


class OutdatedError(CacheError):
    """A file to adopt is of other content than its item's present one."""


class OtherSizeError(CacheError):
    """A file to adopt is of another resolution of the run."""


class DeviceError(UserError):
    """A GPU is out of memory, lost or not visible: no fault of an item, so the job stops."""


class StorageError(UserError):
    """The disk is full or cannot be written, or something is in the way."""


class TrainingError(UserError):
    """The trainer cannot start, or did not end as it should."""


def unreadable(error: OSError, place: str | os.PathLike[str]) -> SourceError:
    """Return the error for a source that cannot be read."""
    what = f"cannot be read ({error.strerror or error})"
    hint = "check that the file exists and is readable"
    return SourceError(what, where=error.filename or place, hint=hint)


_STORAGE_FAULTS = {
    errno.ENOSPC: ("no space left on the disk", "free some space"),
    errno.EDQUOT: ("your disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than this system allows", "raise the limit"),
    errno.EROFS: ("the file system is read-only", "mount it for writing"),
    errno.EISDIR: ("a folder lies where a file belongs", "move it away"),
    errno.ENOTDIR: ("a file lies where a folder belongs", "move it away"),
    errno.EEXIST: ("a file lies where a folder belongs", "move it away"),
    errno.EACCES: ("no permission to write", "give your user the right to write there"),
    errno.EPERM: (
        "the system does not permit this change",
        "remove the write protection (`lsattr`) or check the mount options",
    ),
}


def storage_error(error: Exception, where: str | os.PathLike[str]) -> StorageError | None:
    """Return the one-line error for a fault of the disk, or None where it is another fault.

    safetensors says `os error 28`; torch's archive writer only that it failed writing.
    """
    number = error.errno if isinstance(error, OSError) else None
    if match := re.search(r"os error (\d+)", str(error)):
        number = int(match[1])
    elif "failed writing file" in str(error) or "unexpected pos" in str(error):
        number = errno.ENOSPC
    fault = _STORAGE_FAULTS.get(number or 0)
    if fault is None:
        return None
    what, hint = fault
    hint = f"{hint}, then run the same command; finished files are kept"
    return StorageError(what, where=where, hint=hint)


def system_error(error: OSError) -> StorageError | None:
    """Return the one-line error for a system call that failed; None where a traceback helps more.

    It helps more where no file is named, and where a file of ours is missing.
    """
    place = error.filename if isinstance(error.filename, str) else ""
    if known := storage_error(error, place or "a file"):
        return known
    if not place or isinstance(error, FileNotFoundError):
        return None
    hint = "correct this, then run the same command; finished files are kept"
    return StorageError(error.strerror or type(error).__name__, where=place, hint=hint)


# Words of torch's allocators for CUDA, Apple's GPUs and the CPU; and of cuDNN and cuBLAS, which
# fail like this where no memory is left for their own buffers.
_OUT_OF_MEMORY = re.compile(
    "out of memory|OutOfMemory|cudaErrorMemoryAllocation|can't allocate memory|not enough memory"
    "|Invalid buffer size|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    "|unable to find an engine to execute this computation"
)
_DEVICE_FAULT = re.compile(
    "(?:CUDA|HIP|cuDNN|MIOpen)(?: driver| unknown)? error|(?:CU|HIP)[A-Z]+_STATUS_"
    "|no kernel image|NVIDIA driver|No (?:CUDA|HIP) GPUs",
    re.IGNORECASE,
)


def is_out_of_memory(message: str) -> bool:
    """Return whether an error's message says that memory of a GPU or the machine is short.

    A single sample can fail with the words of cuDNN and cuBLAS for other reasons: repeat them.
    """
    return _OUT_OF_MEMORY.search(message) is not None


def is_surely_memory(message: str) -> bool:
    """Return whether a message of `is_out_of_memory` can mean nothing else.

    cuDNN and cuBLAS say the same of a GPU that they have no kernels for.
    """
    return "unable to find an engine" not in message and "_STATUS_NOT_INITIALIZED" not in message


def is_device_fault(message: str) -> bool:
    """Return whether an error's message blames a GPU: no memory, no kernel, lost, in error."""
    return is_out_of_memory(message) or _DEVICE_FAULT.search(message) is not None


def shortened(value: str) -> str:
    """Return a value as messages quote it: 80 characters at most."""
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def joined(faults: Iterable[str], say: Callable[[str], object] | None = None) -> str:
    """Return faults as part of a message; of many the first ones, and how many more there are.

    Then `say` gets a line for each of them.
    """
    first, *others = every = list(dict.fromkeys(faults))
    while others and len(first) + len(others[0]) < _LONGEST_PART:
        first = f"{first} | {others.pop(0)}"
    if not others:
        return first
    if say is not None:
        for fault in every:
            say(f"faulty: {fault}")
    return f"{first} | and {len(others)} more"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, 200 characters at most, or its kind.

    A first line that ends in a colon is followed by the second; a KeyError gives the key.
    """
    if isinstance(error, KeyError) and error.args:
        return f"it lacks {error.args[0]}"[:200]
    first, *others = [*str(error).strip().splitlines(), ""]
    if first.endswith(":"):
        first = f"{first} {others[0].strip()}"
    return first.strip()[:200] or type(error).__name__


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, or None where none is."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def refuse_unknown(
    kind: str, word: str, known: Collection[str], where: str, *, more: str = ""
) -> None:
    """Refuse the name of a `kind` of section that does not exist; `more` is a further hint.

    Raises:
        ConfigError: names the one that was probably meant.
    """
    if word not in known:
        guess = nearest(word, known)
        hint = "; ".join(filter(None, (f"known: {', '.join(known)}", more)))
        hint = f"did you mean `{guess}`?" if guess else hint
        raise ConfigError(f"there is no {kind} `{shortened(word)}`", where=where, hint=hint)
