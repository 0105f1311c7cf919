"""Batches read ahead of their use, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from latentmake.training.loop.data.batch import Batch
from latentmake.training.loop.data.caches import Caches

_BYTES = 64 << 20  # read before they are needed, besides one batch for each thread
_MOST = 32  # batches ahead


def prefetched(
    caches: Caches, batches: Iterable[Sequence[int]], *, threads: int = 1, pin: bool = False
) -> Generator[Batch, None, None]:
    """Read batches ahead of their use, and yield them in their order.

    Args:
        caches: what to read.
        batches: indices of examples, all of one shape in each batch.
        threads: that read, at least one.
        pin: whether batches lie in pinned memory, from which a GPU takes them faster.

    Raises:
        CacheError: a file has become damaged.
    """
    remaining = iter(batches)
    waiting: deque[tuple[int, Future[Batch]]] = deque()
    ahead = 0
    threads = max(1, threads)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="caches")
    try:
        while True:
            while len(waiting) <= threads or (len(waiting) < _MOST and ahead < _BYTES):
                indices = next(remaining, None)
                if indices is None:
                    break
                waiting.append((caches.size(indices), pool.submit(caches.batch, indices, pin=pin)))
                ahead += waiting[-1][0]
            if not waiting:
                return
            size, batch = waiting.popleft()
            ahead -= size
            yield batch.result()
    finally:
        pool.shutdown(cancel_futures=True)
