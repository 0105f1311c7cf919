"""Errors of the package: a user's mistake (one line, no traceback) or a bug of the package."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Callable, Collection, Iterable

_LONGEST = 80  # characters of a value in a message
_LONGEST_LINE = 490  # characters of a message; `error: ` may stand before it
_LONGEST_PART = 370  # characters of a list of faults in a message


class LatentmakeError(Exception):
    """An error that this package raises on purpose."""


class UserError(LatentmakeError):
    """A user's mistake: the fault, its place (file, folder or key), and a hint to repair it."""

    def __init__(self, what: str, *, where: str | os.PathLike[str] = "", hint: str = "") -> None:
        self.what = what
        self.where = os.fspath(where)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        line = escaped(" ".join(f"{place}{self.what}{hint}".split()))
        if len(line) > _LONGEST_LINE:
            half = _LONGEST_LINE // 2 - 3
            line = f"{line[:half]} ... {line[-half:]}"
        return line


class ConfigError(UserError):
    """An invalid configuration."""


class SeveralMistakesError(ConfigError):
    """Several mistakes of one configuration."""

    def __init__(self, mistakes: Iterable[ConfigError]) -> None:
        self.mistakes = [*mistakes]
        super().__init__("")

    def __str__(self) -> str:
        self.what = joined(map(str, self.mistakes))
        return super().__str__()


class DatasetError(UserError):
    """A dataset is missing, empty or unreadable."""


class SourceError(UserError):
    """One image or caption is damaged, missing or unreadable."""


class ModelError(UserError):
    """Weights or a tokenizer are missing, incomplete or of the wrong kind."""


class CacheError(UserError):
    """A cache file is damaged, is not Latentmake's, or has values that no encoder should give."""


class OutdatedError(CacheError):
    """A file to adopt was made from other content than its item has now."""


class OtherSizeError(CacheError):
    """A file to adopt has another resolution of the run."""


class DeviceError(UserError):
    """A GPU is out of memory, lost or not visible. No item is faulty, so the job stops."""


class StorageError(UserError):
    """The disk is full or cannot be written, or something is in the way."""


class TrainingError(UserError):
    """The trainer cannot start, or failed."""


def unreadable(error: OSError, place: str | os.PathLike[str]) -> SourceError:
    """Return the error for a source that cannot be read."""
    what = f"cannot be read ({error.strerror or error})"
    hint = "check that the file exists and is readable"
    return SourceError(what, where=error.filename or place, hint=hint)


def refuse_folder(error: OSError) -> None:
    """Refuse a folder that cannot be read, as `onerror` of `os.walk`; a missing one has no files.

    Raises:
        StorageError: the folder cannot be read.
    """
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        what, hint = f"cannot be read ({error.strerror})", "check its permissions"
        raise StorageError(what, where=error.filename, hint=hint) from None


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
    """Return the one-line error for a fault of the disk; None for any other fault.

    safetensors reports `os error 28`. torch's archive writer only reports that writing failed.
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


def mistake_of(error: Exception) -> UserError | None:
    """Return the one-line error for a user's mistake, or for a system call that failed.

    Return None, and so show the traceback, if the error names no file or a file is missing, and for
    all other errors.
    """
    if not isinstance(error, OSError):
        return error if isinstance(error, UserError) else None
    place = error.filename if isinstance(error.filename, str) else ""
    if fault := storage_error(error, place or "a file"):
        return fault
    if not place or isinstance(error, FileNotFoundError):
        return None
    hint = "correct this, then run the same command; finished files are kept"
    return StorageError(error.strerror or type(error).__name__, where=place, hint=hint)


# Messages of torch's allocators for CUDA, Apple's GPUs and the CPU, and of cuDNN and cuBLAS, which
# fail with these words if no memory is left for their own buffers.
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
    """Return whether an error's message says that a GPU or the machine ran out of memory.

    A single sample can fail with the messages of cuDNN and cuBLAS for other reasons, so the caller
    should encode it again.
    """
    return _OUT_OF_MEMORY.search(message) is not None


def is_surely_memory(message: str) -> bool:
    """Return whether a message of `is_out_of_memory` can have no other reason.

    cuDNN and cuBLAS give the same messages on a GPU that they have no kernels for.
    """
    return "unable to find an engine" not in message and "_STATUS_NOT_INITIALIZED" not in message


def is_device_fault(message: str) -> bool:
    """Return whether an error's message blames a GPU: no memory, no kernel, lost or in error."""
    return is_out_of_memory(message) or _DEVICE_FAULT.search(message) is not None


def shortened(value: str) -> str:
    """Return a value as messages quote it: at most 80 characters."""
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def joined(faults: Iterable[str], say: Callable[[str], object] | None = None) -> str:
    """Return faults as part of a message; if they are too long, the first ones and a count.

    In that case `say` is called with a line for each fault.
    """
    lines = list(dict.fromkeys(faults))
    first, *others = lines
    while others and len(first) + len(others[0]) < _LONGEST_PART:
        first = f"{first} | {others.pop(0)}"
    if not others:
        return first
    if say is not None:
        for fault in lines:
            say(f"faulty: {fault}")
    return f"{first} | and {len(others)} more"


def escaped(text: str) -> str:
    """Return a text with escaped control characters, such as those of a file's name.

    A terminal would carry out an escape sequence.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message (at most 200 characters), or the error's class.

    If the first line ends in a colon, the second follows. A KeyError gives its key.
    """
    if isinstance(error, KeyError) and error.args:
        return f"it lacks {error.args[0]}"[:200]
    first, *others = [*str(error).strip().splitlines(), ""]
    if first.endswith(":"):
        first = f"{first} {others[0].strip()}"
    return first.strip()[:200] or type(error).__name__


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to `word`; None if no name is similar."""
    matches = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def refuse_unknown(
    kind: str, word: str, names: Collection[str], where: str, *, more: str = ""
) -> None:
    """Refuse the name of a `kind` of section that does not exist; `more` is a further hint.

    Raises:
        ConfigError: there is no such name. The message says which one was probably meant.
    """
    if word not in names:
        guess = nearest(word, names)
        hint = "; ".join(filter(None, (f"known: {', '.join(names)}", more)))
        hint = f"did you mean `{guess}`?" if guess else hint
        raise ConfigError(f"there is no {kind} `{shortened(word)}`", where=where, hint=hint)
