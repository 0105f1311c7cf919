"""Processes that read frames: started when needed, and replaced where one hangs or crashes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import latentmake
from latentmake.errors import SourceError
from latentmake.files.disk import usable_cores
from latentmake.files.frames.ended import EndedError, HungError
from latentmake.files.frames.protocol import ALIVE, DONE, FAULT, FRAME, HEAD
from latentmake.geometry.clips import Media

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READ_TIMEOUT = 120.0
"""Seconds without a decoded frame after which a process is taken to hang."""

_ENOUGH = 8  # files that are worth a process
_MOST = 8  # processes that probe
_KILLED_SECONDS = 5.0  # until the system gives up a killed process that waits for a disk
_REPLACE = "convert it again, replace or remove it"


class _Worker:
    """One process."""

    def __init__(self, timeout: float) -> None:
        root = str(Path(latentmake.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._timeout = timeout
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "latentmake.files.frames.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # what ends us by Ctrl-C or a signal is no fault of the file
        )

    def ask(self, path: str, indices: Sequence[int] | None) -> bool:
        """Send a request; return False if the process has ended meanwhile."""
        # It may live on while this process goes to another folder.
        request: dict[str, object] = {"path": str(Path(path).absolute())}
        if indices is not None:
            request["indices"] = [*indices]
        assert self.process.stdin is not None
        left = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while left:
                left = left[self.process.stdin.write(left) or 0 :]
        except OSError:
            return False
        return self.process.poll() is None

    def receive(self, path: str) -> tuple[int, int, Any]:
        """Return the next message: its kind, and index and pixels of a frame, or 0 and JSON.

        Raises:
            SourceError: the process hangs or crashed.
        """
        import numpy as np

        while True:
            head = bytearray(HEAD.size)
            self._fill(memoryview(head), path)
            kind, first, height, width = HEAD.unpack(head)
            if kind == FRAME:
                pixels = np.empty((height, width, 3), np.uint8)
                self._fill(pixels.data.cast("B"), path)
                return kind, first, pixels
            if kind == DONE:
                return kind, 0, None
            if kind != ALIVE:
                data = bytearray(first)
                self._fill(memoryview(data), path)
                return kind, 0, json.loads(data)

    def _fill(self, left: memoryview, path: str) -> None:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while left:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            if not poll.poll(self._timeout * 1000):
                what = f"gave no frame for {self._timeout:g} seconds"
                raise HungError(what, where=path, hint=_REPLACE)
            count = os.readv(pipe, [left])
            if not count:
                raise self._crash(path)
            left = left[count:]

    def _crash(self, path: str) -> SourceError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_SECONDS)
        status = self.process.returncode
        if status is None or status >= 0:
            what, hint = f"ended the process that reads it (exit status {status})", _REPLACE
        elif -status == signal.SIGKILL:
            what = "was being read when the reading process was killed (SIGKILL)"
            hint = "end other programs if memory is short, and run the same command again"
        else:
            what, hint = f"made FFmpeg crash ({signal.Signals(-status).name})", _REPLACE
        return SourceError(what, where=path, hint=hint)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_SECONDS)


class Workers:
    """Processes that read files, each one file at a time; any threads may use them.

    Args:
        timeout: seconds without a decoded frame after which a process is ended.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = READ_TIMEOUT if timeout is None else timeout
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        # Reentrant: an abandoned iterator may be ended by the garbage collector at any moment.
        self._lock = threading.RLock()
        self._is_closed = False

    def frames_at(
        self, path: str, indices: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield (index, RGB [H, W, 3]) of some frames; see `frames_at` below."""
        if not indices:
            return
        kind, last = FRAME, None
        with self._asked(path, indices) as worker:
            for number in range(len(indices)):
                kind, index, content = worker.receive(path)
                if kind != FRAME:
                    break
                if number < len(indices) - 1:
                    yield index, content
                else:  # whoever has the last frame may not ask for more: let the process go before
                    last = index, content
                    kind, _, content = worker.receive(path)
        if kind == FAULT:
            raise _fault(path, content)
        if last is not None:
            yield last

    def probe(self, path: str) -> Media:
        """Return size and length of a video or npz clip.

        Raises:
            SourceError: it cannot be read, or its process hangs or crashes.
        """
        with self._asked(path, None) as worker:
            kind, _, content = worker.receive(path)
        if kind == FAULT:
            raise _fault(path, content)
        return Media(*content)

    @contextmanager
    def _asked(self, path: str, indices: Sequence[int] | None) -> Iterator[_Worker]:
        """Lend a process that was asked; it is ended unless its answer is taken to the end."""
        worker, is_new = self._take(path)
        while not worker.ask(path, indices) and not is_new:  # it was ended while it was idle
            self._end(worker)
            worker, is_new = self._take(path)
        try:
            yield worker
        except BaseException:
            self._end(worker)
            raise
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)

    def _take(self, path: str) -> tuple[_Worker, bool]:
        with self._lock:
            if self._is_closed:
                what = "was no longer read: the job ended before"
                raise SourceError(what, where=path, hint="run the same command again")
            if self._idle:
                return self._idle.pop(), False
        worker = _Worker(self._timeout)
        with self._lock:
            self._all.add(worker)
            is_late = self._is_closed
        if is_late:
            self._end(worker)
        return worker, True

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)

    def close(self) -> None:
        """End all processes, for good."""
        with self._lock:
            self._is_closed = True
            workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.kill()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _fault(path: str, content: tuple[str, str, tuple[int, int] | None]) -> SourceError:
    what, hint, ended = content
    return EndedError(path, *ended) if ended else SourceError(what, where=path, hint=hint)


_shared = Workers()


def _forget() -> None:
    global _shared
    _shared = Workers()


os.register_at_fork(after_in_child=_forget)  # two processes must not read from one pipe


def frames_at(path: str, indices: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (index, RGB [H, W, 3]) of some frames of a video or npz clip.

    They are exactly those of a full sequential decode. Another process decodes, which ends with
    this one; it is used again if all frames are taken, and ended otherwise.

    Args:
        path: the file.
        indices: of frames in the order of display, ascending, none twice.

    Raises:
        SourceError: it cannot be read, is no video, is damaged before the last of them, or makes
            the decoder hang or crash.
        EndedError: it has fewer frames; the others were yielded.
    """
    return _shared.frames_at(path, indices)


def probe_videos(paths: Sequence[str]) -> Iterator[Media | SourceError]:
    """Yield size and length of videos and npz clips, or what is wrong, in the order of the paths.

    Many are read side by side, few by one process.
    """
    count = min(_MOST, usable_cores(), -(-len(paths) // _ENOUGH))
    if not paths:
        return
    with Workers() as workers, ThreadPoolExecutor(count) as pool:

        def probed(path: str) -> Media | SourceError:
            try:
                return workers.probe(path)
            except SourceError as error:
                return error

        try:
            yield from pool.map(probed, paths)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.close()
