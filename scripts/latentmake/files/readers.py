"""Processes that read videos: a decoder that crashes or hangs takes no other file along."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from latentmake.errors import SourceError, storage_error
from latentmake.files.disk import usable_cores
from latentmake.files.video import probe
from latentmake.geometry.clips import Media

READ_TIMEOUT = 120.0
"""Seconds without a decoded frame after which a process is taken to hang."""

_ENOUGH = 8  # files that are worth a process
_MOST = 8  # processes that probe

_KILLED_SECONDS = 5.0  # until the system gives up a killed process that waits for a disk

_Make = Callable[..., Iterator[Any]]
_Packed = tuple[bytes, str, list[int]]
"""A pickle, the file of its arrays, and the bytes of each."""


class ClosedError(Exception):
    """The processes were ended while something was read."""


class Readers:
    """Processes that read files, each one file at a time; any threads may use them.

    A context: at its end all processes are ended.

    Args:
        timeout: seconds without a sign of life after which a process is ended.
    """

    def __init__(self, timeout: float = READ_TIMEOUT) -> None:
        self._timeout = timeout
        self._idle: list[_Reader] = []
        self._all: set[_Reader] = set()
        self._lock = threading.RLock()  # the garbage collector may end an iterator at any moment
        self._is_closed = False

    def each(self, path: str, make: _Make, *arguments: object) -> Iterator[Any]:
        """Yield what a generator function yields in another process, made when it is asked for.

        Args:
            path: the file that is read, for messages.
            make: the function, of a module; None in what it yields is a sign of life.
            arguments: of the function.

        Raises:
            SourceError: the function raises it, or its process hangs or crashes.
            StorageError: the folder for temporary files has no room for an array.
            ClosedError: the processes were ended meanwhile.
        """
        reader = self._asked(make, arguments)
        try:
            while (packed := reader.answer.result(self._timeout)) is not None:
                if packed:
                    yield _unpacked(*packed)
                reader.ask()
        except TimeoutError:
            raise _fault(f"gave no frame for {self._timeout:g} seconds", path) from None
        except OSError as error:
            raise storage_error(error, tempfile.gettempdir()) or error from None
        except RuntimeError as error:
            if self._is_closed:
                raise ClosedError from None
            if not isinstance(error, BrokenProcessPool):
                raise
            raise _fault("crashed the process that reads it, or memory was short", path) from None
        finally:
            if reader.answer.done():
                with self._lock:
                    self._idle.append(reader)
            else:
                reader.kill()

    def _asked(self, make: _Make, arguments: Sequence[object]) -> _Reader:
        """Return a process that works on a new function."""
        while True:
            with self._lock:
                reader = self._idle.pop() if self._idle else None
            if reader is None:
                reader = _Reader()
                with self._lock:
                    self._all.add(reader)
            if self._is_closed:
                reader.kill()
                raise ClosedError
            with contextlib.suppress(BrokenProcessPool):  # it was ended while it was idle
                reader.ask(make, *arguments)
                return reader

    def close(self) -> None:
        """End all processes, for good."""
        with self._lock:
            self._is_closed = True
            readers = [*self._all]
        for reader in readers:
            reader.kill()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fault(what: str, path: str) -> SourceError:
    return SourceError(what, where=path, hint="convert it again, replace or remove it")


_starting = threading.Lock()


class _Reader:
    """A process, its latest answer, and the folder of files that it hands over."""

    answer: Future[_Packed | tuple[()] | None]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="latentmake-", ignore_cleanup_errors=True)
        context, folder = multiprocessing.get_context("spawn"), self._folder.name
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(folder,)
        )
        with _starting:
            # It would import `__main__`, and that of a job is a script that does all its work.
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                pid = self._pool.submit(os.getpid)
            finally:
                sys.modules["__main__"] = main
        self._pid = pid.result()

    def ask(self, *what: Any) -> None:
        """Ask for the first value of a function with its arguments, or else for the next one."""
        self.answer = self._pool.submit(_next, *what)

    def kill(self) -> None:
        """End the process, whatever it does."""
        for process in multiprocessing.active_children():
            if process.pid == self._pid:
                process.kill()
                process.join(_KILLED_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()


def _unpacked(pickled: bytes, path: str, sizes: list[int]) -> Any:
    """Load a value whose arrays lie in a file, which is deleted; they can be written to."""
    arrays, place = [], 0
    if path:
        with Path(path).open("rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        Path(path).unlink()
        for size in sizes:
            arrays.append(memory[place : place + size])
            place += size
    return pickle.loads(pickled, buffers=arrays)  # noqa: S301  # our own process made it


# -- inside of a process --------------------------------------------------------------------------

_values: Iterator[Any] = iter(())


def _begin(folder: str) -> None:
    os.setpgrp()  # what ends us by Ctrl-C or a signal is no fault of the file
    tempfile.tempdir = folder
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # even out of the midst of a decoder


def _next(make: _Make | None = None, *arguments: object) -> _Packed | tuple[()] | None:
    """Return the next value; () is a sign of life, None the end.

    Arrays are written to a file, whose pages the other process maps: a pipe takes several copies.
    """
    global _values
    if make is not None:
        _values = make(*arguments)
    arrays: list[pickle.PickleBuffer] = []
    try:
        value = next(_values)
    except StopIteration:
        return None
    if value is None:
        return ()
    pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    if not arrays:
        return pickled, "", []
    with tempfile.NamedTemporaryFile(delete=False) as file:
        sizes = [file.write(each.raw()) for each in arrays]
    return pickled, file.name, sizes


# -- probing --------------------------------------------------------------------------------------


def _probed(path: str) -> Iterator[Media]:
    yield probe(path)


def probe_videos(paths: Sequence[str]) -> Iterator[Media | SourceError]:
    """Yield size and length of videos and npz clips, or what is wrong, in the order of the paths.

    Many are read side by side, few by one process.
    """
    count = min(_MOST, usable_cores(), -(-len(paths) // _ENOUGH))
    if not paths:
        return
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
