"""Processes that read videos: a decoder that crashes or hangs takes no other file along.

A process gets a generator function and its arguments by its stdin, and is asked for one value after
the other. It ends when that pipe is closed, so also with the process that started it.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

from latentmake.errors import SourceError
from latentmake.files.video import probe
from latentmake.files.workspace import usable_cores
from latentmake.geometry.clips import Media

READ_TIMEOUT = 120.0
"""Seconds without a decoded frame after which a process is taken to hang."""

_ENOUGH = 8  # files that are worth a process
_MOST = 8  # processes that probe

_KILLED_SECONDS = 5.0  # until the system gives up a killed process that waits for a disk

_Make = Callable[..., Iterator[Any]]
_Process = subprocess.Popen[bytes]


class Readers(AbstractContextManager["Readers"]):
    """Processes that read files, each one file at a time; any threads may use them.

    A context: at its end all processes are ended.

    Args:
        timeout: seconds without a sign of life after which a process is ended.
    """

    def __init__(self, timeout: float = READ_TIMEOUT) -> None:
        self._timeout = timeout
        self._idle: list[_Process] = []
        self._all: list[_Process] = []
        self._is_closed = False

    def each(self, path: str, make: _Make, *arguments: object) -> Iterator[Any]:
        """Yield what a generator function yields in another process, made when it is asked for.

        Args:
            path: the file that is read, for messages.
            make: the function, of a module; None in what it yields is a sign of life.
            arguments: of the function.

        Raises:
            SourceError: the function raises it, or its process hangs or crashes.
            RuntimeError: the processes were ended meanwhile.
        """
        process, question, is_asked = self._free(), (make, *arguments), True
        try:
            while answer := _ask(process, question, path, self._timeout):
                is_asked = False
                if isinstance(answer, Exception):
                    raise answer
                if answer[0] is not None:
                    yield answer[0]
                question, is_asked = (), True
            is_asked = False
        except SourceError:
            if self._is_closed:
                raise RuntimeError("the processes were ended") from None
            raise
        finally:
            if is_asked:
                _kill(process)
                self._all.remove(process)  # so that its pipes are closed
            else:
                self._idle.append(process)

    def _free(self) -> _Process:
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                if (process := self._idle.pop()).poll() is None:
                    return process
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=1 << 18,
            process_group=0,  # what ends us by Ctrl-C or a signal is no fault of the file
        )
        self._all.append(process)
        if self._is_closed:
            process.kill()
        return process

    def close(self) -> None:
        """End all processes, for good."""
        self._is_closed = True
        for process in [*self._all]:
            _kill(process)

    def __exit__(self, *_: object) -> None:
        self.close()


def _ask(
    process: _Process, question: tuple[Any, ...], path: str, timeout: float
) -> tuple[Any, ...] | Exception:
    """Ask for the first value of a function, or for the next one; raises SourceError.

    Returns:
        A value in a tuple, () at the end, or an error of the function.
    """
    assert process.stdin is not None and process.stdout is not None
    what, answers = "crashed the process that reads it, or memory was short", select.poll()
    answers.register(process.stdout, select.POLLIN)
    with suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
        pickle.dump(question, process.stdin)
        process.stdin.flush()
        if answers.poll(1000 * timeout):
            found: tuple[Any, ...] | Exception = pickle.load(process.stdout)  # noqa: S301
            return found
        what = f"gave no frame for {timeout:g} seconds"
    raise SourceError(what, where=path, hint="convert it again, replace or remove it")


def _kill(process: _Process) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)


def _answer() -> None:
    """Answer until nobody asks."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a decoder says
        values: Iterator[Any] = iter(())
        with suppress(EOFError):
            while True:
                if asked := pickle.load(sys.stdin.buffer):  # noqa: S301  # our own process made it
                    values = asked[0](*asked[1:])
                answer: tuple[Any, ...] | Exception = ()
                try:
                    answer = (next(values),)
                except StopIteration:
                    pass
                except Exception as error:
                    error.add_note("".join(traceback.format_exception(error)))
                    answer = error
                pickle.dump(answer, answers, protocol=5)
                answers.flush()


# -- probing --------------------------------------------------------------------------------------


def _probed(path: str) -> Iterator[Media]:
    yield probe(path)


def probe_videos(paths: Sequence[str]) -> Iterator[Media | SourceError]:
    """Yield size and length of videos and npz clips, or what is wrong, in the order of the paths.

    Many are read side by side, few by one process.
    """
    count = min(_MOST, usable_cores(), -(-len(paths) // _ENOUGH)) or 1
    with Readers() as readers, ThreadPoolExecutor(count) as pool:

        def probed(path: str) -> Media | SourceError:
            try:
                (media,) = readers.each(path, _probed, path)
            except SourceError as error:
                return error
            return Media(*media)

        try:
            yield from pool.map(probed, paths)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            readers.close()


if __name__ == "__main__":
    _answer()
