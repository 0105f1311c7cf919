"""Batches in time: read ahead, by processes of their own or by a thread.

The processes run `reader.py`, which imports no torch, and write into memory shared with this one.
What they read is not copied again: a batch's tensors are that memory, which is used for another
batch once nobody refers to them any more. torch's DataLoader, whose workers send each batch through
new shared memory and a queue, reaches a fraction of this rate (tests/bench/loader.py), and its
workers either import torch first or are forks of a process that has threads and a GPU in use.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from latentmake.errors import TrainingError
from latentmake.training.sd.data import reader
from latentmake.training.sd.data.batch import Batch, Plan, unfold

if TYPE_CHECKING:
    from latentmake.training.sd.data.caches import Caches

__all__ = ["prefetched"]

_AHEAD_BYTES = 64 << 20  # what is read before it is needed, besides one batch for each process
_AHEAD = 32  # most batches a process is ahead
_SEGMENT = 16 << 20  # bytes of shared memory asked for at first; each time twice as many
_LARGEST = 1 << 30  # except that this is enough
_SMALLEST = 1 << 16  # bytes of a block
_PINNED = 2  # batches in pinned memory ahead


class _Segment(NamedTuple):
    begin: int
    memory: mmap.mmap


class _Lease(NamedTuple):
    """A block of memory in use.

    Attributes:
        segment: that it is part of.
        start: where in it the block begins.
        memory: its bytes; when the last tensor that uses them is gone, the block is free.
    """

    segment: _Segment
    start: int
    memory: torch.Tensor


class _Memory:
    """Memory that readers can share, in blocks that are used again.

    Fresh memory costs as much as reading into it: the system clears each page.
    """

    def __init__(self, *, shared: bool) -> None:
        self._file = None
        if shared:
            # Not in /dev/shm, which is small in most containers.
            if hasattr(os, "memfd_create"):
                self._file = os.fdopen(os.memfd_create("latentmake"), "w+b", buffering=0)
            else:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- see `close`
        self._segment: _Segment | None = None
        self._used = self._total = 0
        self._free: dict[int, list[tuple[_Segment, int]]] = {}

    @property
    def descriptor(self) -> int:
        """Of the shared memory."""
        assert self._file is not None
        return self._file.fileno()

    def _new(self, size: int) -> tuple[_Segment, int]:
        if self._segment is None or self._used + size > len(self._segment.memory):
            length = max(size, min(_LARGEST, max(_SEGMENT, self._total)))
            if self._file is None:
                memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                self._file.truncate(self._total + length)
                memory = mmap.mmap(self.descriptor, length, offset=self._total)
            with suppress(OSError, AttributeError):  # where the system has large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._segment, self._used = _Segment(self._total, memory), 0
            self._total += length
        start = self._used
        self._used += size
        return self._segment, start

    def take(self, size: int) -> _Lease:
        """Return a block of at least so many bytes; what they are, nobody knows."""
        kind = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free.setdefault(kind, [])
        segment, start = block = free.pop() if free else self._new(kind)
        array = np.frombuffer(segment.memory, np.uint8, size, start)
        weakref.finalize(array, free.append, block).atexit = False
        return _Lease(segment, start, torch.from_numpy(array))

    def close(self) -> None:
        """Let go of the file; blocks in use stay until they are used no more."""
        if self._file is not None:
            self._file.close()


class _Reader:
    """A process that reads."""

    def __init__(self, memory: _Memory) -> None:
        self._replies: deque[bytes] = deque()
        self._begun = b""
        arguments = [str(memory.descriptor), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reader.__file__)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory.descriptor],
            process_group=0,  # Ctrl-C is this process's to answer; the reader ends with its input
            bufsize=0,
        )

    def order(self, made: Plan, lease: _Lease) -> None:
        """Ask for a batch."""
        segment = lease.segment
        task = [segment.begin, len(segment.memory), lease.start, made.size, made.parts]
        line = memoryview(json.dumps(task, separators=(",", ":")).encode() + b"\n")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what has happened, `wait` says
            while line:
                line = line[self._process.stdin.write(line) or 0 :]

    def wait(self) -> list[int]:
        """Wait for the batch asked for longest ago; return what `reader.fill` returned there.

        Raises:
            TrainingError: the process has ended.
        """
        assert self._process.stdout is not None
        while not self._replies:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._gone()
            *whole, self._begun = (self._begun + data).split(b"\n")
            self._replies += whole
        return [int(number) for number in self._replies.popleft().split()]

    def _gone(self) -> TrainingError:
        status = self._process.wait()
        cause = f"it ended with status {status}"
        if status < 0:
            cause = f"it was killed by {signal.Signals(-status).name}"
        return TrainingError(
            f"a process that reads caches is gone ({cause})",
            where="trainer.dataloader_num_workers",
            mend="set it to 0 to do without them, and give the same command again",
        )

    def close(self) -> None:
        """End it at once: it only reads."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class _Readers:
    """Where batches are read: by processes in turn, or by a thread of this one."""

    def __init__(self, caches: Caches, workers: int) -> None:
        self._caches = caches
        self._memory = _Memory(shared=workers > 0)
        self._readers = [_Reader(self._memory) for _ in range(workers)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="caches")
        self._count = 0

    def start(self, indices: Sequence[int]) -> tuple[int, Callable[[], Batch]]:
        """Begin to read a batch; return its bytes, and what waits for it and makes it."""
        caches, made = self._caches, self._caches.plan(indices)
        lease = self._memory.take(made.size)
        if not self._readers:
            read = self._thread.submit(caches.read, made, lease.memory)

            def finish() -> Batch:
                read.result()
                return unfold(lease.memory, made)

            return made.size, finish
        process = self._readers[self._count % len(self._readers)]
        self._count += 1
        process.order(made, lease)

        def wait() -> Batch:
            caches.mend(made, lease.memory, process.wait())
            return unfold(lease.memory, made)

        return made.size, wait

    def close(self) -> None:
        for each in self._readers:
            each.close()
        self._thread.shutdown(cancel_futures=True)
        self._memory.close()


def _read(
    caches: Caches, batches: Iterable[Sequence[int]], workers: int
) -> Generator[Batch, None, None]:
    remaining = iter(batches)
    waiting: deque[tuple[int, Callable[[], Batch]]] = deque()
    least, most = max(1, workers) + 1, max(1, workers) * _AHEAD
    size = 0
    with closing(_Readers(caches, workers)) as readers:
        while True:
            while len(waiting) < least or (len(waiting) < most and size < _AHEAD_BYTES):
                indices = next(remaining, None)
                if indices is None:
                    break
                waiting.append(readers.start(indices))
                size += waiting[-1][0]
            if not waiting:
                return
            bytes_of_it, finish = waiting.popleft()
            size -= bytes_of_it
            yield finish()
            del finish  # the batch's memory may be needed before the next is waited for


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty_like(tensor, pin_memory=True)
    # Not by torch, which would start threads for it.
    np.copyto(pinned.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())
    return pinned


def _pinned(batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
    """Copy batches to pinned memory, in a thread, ahead of their use."""

    def take() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        return batch._replace(
            latents=_pin(batch.latents),
            text=_pin(batch.text),
            mask=None if batch.mask is None else _pin(batch.mask),
        )

    with ThreadPoolExecutor(1, thread_name_prefix="pinned") as thread:
        waiting = deque(thread.submit(take) for _ in range(_PINNED))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(take))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)
            batches.close()


def prefetched(
    caches: Caches, batches: Iterable[Sequence[int]], *, workers: int = 0, pin: bool = False
) -> Generator[Batch, None, None]:
    """Read batches ahead of their use, and yield them in their order.

    Args:
        caches: what to read.
        batches: indices of examples, all of one shape in each batch.
        workers: processes that read; 0 for a thread of this one. Caches that are kept in memory
            are read once, by a thread.
        pin: whether to copy batches to pinned memory, from which a GPU takes them faster.

    Raises:
        CacheError: a file has become damaged.
        TrainingError: a process that reads is gone.
    """
    read = _read(caches, batches, 0 if caches.in_memory else workers)
    return _pinned(read) if pin else read
