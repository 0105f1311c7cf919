"""Encoding clips of videos while they are made, few of which are in memory at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from latentmake.caches.clip_queue import Broken, ClipQueue, Made
from latentmake.caches.inputs import Clips, FramesAt, Maker, clip_maker
from latentmake.caches.pipeline import Pipeline
from latentmake.caches.reading import Reading, refuse_changed
from latentmake.errors import SourceError
from latentmake.files.frames import Workers
from latentmake.plan.orders import Order, Work


def make_clips(
    order: Order,
    items: Sequence[Work],
    pipeline: Pipeline,
    threads: int,
    *,
    read_item: Callable[[Work, dict[str, list[Any]] | None], Reading],
    count: Callable[[Reading], object],
    fail: Callable[[Reading, int, str], object],
) -> None:
    """Make and encode the clips of videos that a job lacks.

    Items of one file are read together, so that it is opened once.

    Args:
        order: of the job.
        items: of it.
        pipeline: encodes them.
        threads: number of threads, each of which reads one file at a time.
        read_item: reads an item; told the stat and digest of files read just now.
        count: told of each reading.
        fail: told of a reading whose clips cannot be made to the end, how many are left, and the
            fault in a line.
    """
    claimed: set[str] = set()
    lock = threading.Lock()
    files: dict[tuple[str | None, tuple[str, ...]], list[Work]] = {}
    for work in items:
        files.setdefault((work.item.source, work.item.controls), []).append(work)

    def read(group: list[Work]) -> tuple[list[Reading], Maker | None]:
        readings: list[Reading] = []
        for work in group:
            readings.append(read_item(work, readings[-1].sources if readings else None))
        with lock:
            for reading in readings:
                new = {key: each for each, key in reading.missing.items() if key not in claimed}
                reading.missing = {target: key for key, target in new.items()}
                claimed.update(new)
        missing = [reading for reading in readings if reading.missing]
        try:
            return readings, maker_of(order, missing, workers.frames_at) if missing else None
        except SourceError as error:
            for reading in missing:
                reading.fault, reading.keys, reading.missing = str(error), {}, {}
            return readings, None

    begun: dict[str, tuple[Reading, set[str]]] = {}  # of each stem, the keys yet to be made
    with (
        Workers() as workers,
        ClipQueue(files.values(), read, threads, workers.close) as clips,
    ):
        for event in clips.events():
            if event is None:
                pipeline.flush()
            elif isinstance(event, Made):
                _add(event, pipeline, begun)
            elif isinstance(event, Broken):
                for item in event.items:
                    reading, left = begun[item.stem]
                    fail(reading, len(left), event.fault)
            else:
                for reading in event:
                    begun[reading.item.stem] = reading, set(reading.missing.values())
                    count(reading)
            del event  # or its clip would stay in memory while the next one is waited for


def maker_of(order: Order, readings: Sequence[Reading], frames_at: FramesAt) -> Maker:
    """Return what makes the missing clips of items of one file."""
    wanted = [Clips(each.item, each.content, each.missing) for each in readings]
    first = readings[0]
    paths = list(filter(None, (first.item.source, *first.item.controls)))
    check = partial(refuse_changed, paths, first.sources)
    return clip_maker(order, wanted, frames_at, check)


def _add(made: Made, pipeline: Pipeline, begun: dict[str, tuple[Reading, set[str]]]) -> None:
    left, release = len(made.samples), made.release

    def released() -> None:
        nonlocal left
        left -= 1
        if not left:
            release()

    while made.samples:  # no name is given to a sample: it would keep it in memory
        begun[made.samples[0].item.stem][1].discard(made.samples[0].key)
        pipeline.add(made.samples.pop(0), released)
