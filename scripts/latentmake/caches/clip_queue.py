"""Threads that make clips ahead of the encoder, of which few are in memory at any time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from latentmake.caches.inputs import Maker, Sample
from latentmake.data.item import Item
from latentmake.errors import SourceError

Group = TypeVar("Group")
Read = TypeVar("Read")

CLIPS = 2
"""Clips of a thread in memory: one being made, and one that waits or is being encoded."""


class Made(NamedTuple):
    """Samples of one clip; `release` is to be called when none of them is in memory any more."""

    samples: list[Sample]
    release: Callable[[], None]


class Broken(NamedTuple):
    """Items of a file that cannot be read on, and its fault in a line."""

    items: list[Item]
    fault: str


class _StoppedError(Exception):
    """Nobody takes clips any more."""


class _Slots:
    """Room for the clips of one thread."""

    def __init__(self) -> None:
        self._free = CLIPS
        self._changed = threading.Condition()
        self._is_closed = False

    def take(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._free >= count)
            if self._is_closed:
                raise _StoppedError
            self._free -= count

    def give(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ClipQueue(Generic[Group, Read]):
    """Clips of groups of items, made by several threads, each of which reads one group at a time.

    A context: at its end the threads are stopped.

    Args:
        groups: items that are read together.
        read: reads a group: what is told about it, and the maker of its clips if any are needed.
        threads: number of threads.
        stop: called at the end, before the threads are waited for: ends what they wait for.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        read: Callable[[Group], tuple[Read, Maker | None]],
        threads: int,
        stop: Callable[[], object] = bool,
    ) -> None:
        self._stop = stop
        self._groups = iter(groups)
        self._read = read
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Read | Made | Broken | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._slots = [_Slots() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(slots,), name="clips", daemon=True)
            for slots in self._slots
        ]

    def __enter__(self) -> ClipQueue[Group, Read]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for slots in self._slots:
            slots.close()
        self._stop()
        for thread in self._threads:
            thread.join()

    def events(self) -> Iterator[Read | Made | Broken | None]:
        """Yield what was read, made, or found broken; None where nothing is ready.

        At None all clips that were taken must be released, or no thread may go on.
        """
        running = len(self._threads)
        while running:
            if self._events.empty():
                yield None
            # No name is given to what is yielded: it would keep a clip in memory.
            box = [self._events.get()]
            if box[0] is None:
                running -= 1
            elif isinstance(box[0], BaseException):
                raise box[0]
            else:
                yield box.pop()  # type: ignore[misc]

    def _run(self, slots: _Slots) -> None:
        try:
            while (group := self._next(slots)) is not None:
                read, maker = self._read(group)
                self._events.put(read)
                if maker is not None:
                    self._make(maker, slots)
        except _StoppedError:
            pass
        except BaseException as error:
            self._events.put(error)
        finally:
            self._events.put(None)

    def _next(self, slots: _Slots) -> Group | None:
        slots.take(0)
        with self._lock:
            return next(self._groups, None)

    def _make(self, maker: Maker, slots: _Slots) -> None:
        try:
            while maker.left:
                others = int(maker.holds_another)
                slots.take(1 + others)
                for _ in range(others):
                    slots.give()  # of the clip for whose sake the thread has waited
                self._events.put(Made(maker.make(), slots.give))
        except (SourceError, OSError) as error:
            self._events.put(Broken(maker.left, str(error)))
            slots.give()
