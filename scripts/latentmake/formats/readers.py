"""Processes that read videos, so that a decoder that crashes or hangs harms only one file.

A process gets a generator function and its arguments through its stdin, and returns one value for
each further request. It ends when that pipe is closed, and so at the latest with its parent.
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

from latentmake.base.errors import SourceError
from latentmake.base.machine import usable_cores
from latentmake.formats.video import probe
from latentmake.geometry.clips import Media

READ_TIMEOUT = 120.0
"""Seconds without a decoded frame after which a process counts as hanging."""

_ENOUGH = 8  # files per process; starting one for fewer does not pay
_MOST = 8  # processes that probe, at most

_KILLED_SECONDS = 5.0  # longest wait for a killed process, which may be stuck in disk I/O

_Make = Callable[..., Iterator[Any]]
_Process = subprocess.Popen[bytes]


class Readers(AbstractContextManager["Readers"]):
    """Pool of processes that read one file at a time. Any number of threads may use it.

    The end of this context ends all processes.

    Args:
        timeout: seconds without a sign of life after which a process is killed.
    """

    def __init__(self, timeout: float = READ_TIMEOUT) -> None:
        self._timeout = timeout
        self._idle: list[_Process] = []
        self._all: list[_Process] = []
        self._is_closed = False

    def iterate(self, path: str, make: _Make, *arguments: object) -> Iterator[Any]:
        """Run a generator function in another process, and yield its values.

        The process makes each value when it is requested.

        Args:
            path: path of the file that is read, for messages.
            make: generator function at the top level of a module. If it yields None, that is a sign
                of life and no value.
            arguments: arguments of the function.

        Raises:
            SourceError: the function raises it, or its process hangs or crashes.
            RuntimeError: another thread has closed the pool.
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
                self._all.remove(process)  # without a reference its pipes are closed
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
            # Ctrl-C must not reach it: a reader that dies looks like a fault of its file.
            process_group=0,
        )
        self._all.append(process)
        if self._is_closed:
            process.kill()
        return process

    def close(self) -> None:
        """End all processes for good."""
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
        A tuple with the value, () at the end, or an error that the function raised.
    """
    assert process.stdin is not None and process.stdout is not None
    what, answers = "crashed the process that reads it, or memory was short", select.poll()
    answers.register(process.stdout, select.POLLIN)
    with suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
        pickle.dump(question, process.stdin)
        process.stdin.flush()
        if answers.poll(1000 * timeout):
            answer: tuple[Any, ...] | Exception = pickle.load(process.stdout)  # noqa: S301
            return answer
        what = f"gave no frame for {timeout:g} seconds"
    raise SourceError(what, where=path, hint="convert it again, replace or remove it")


def _kill(process: _Process) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)


def _answer() -> None:
    """Answer requests from stdin until the pipe is closed."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # lines that a decoder prints must not mix with the answers
        values: Iterator[Any] = iter(())
        with suppress(EOFError):
            while True:
                if request := pickle.load(sys.stdin.buffer):  # noqa: S301  # our own process made it
                    values = request[0](*request[1:])
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


def probe_videos(paths: Sequence[str]) -> Iterator[Media | SourceError]:
    """Yield size and length of videos and npz clips, or their faults, in the order of the paths.

    A few files are read by one process, many by several in parallel.
    """
    count = min(_MOST, usable_cores(), -(-len(paths) // _ENOUGH)) or 1
    with Readers() as readers, ThreadPoolExecutor(count) as pool:

        def probed(path: str) -> Media | SourceError:
            try:
                (media,) = readers.iterate(path, probe, path)
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
