"""Clips of videos, encoded while they are made; few of them are in memory at any time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from latentmake.caches.inputs import Reading, Sample, refuse_changed, stored_size
from latentmake.caches.job import Job
from latentmake.caches.pipeline import Pipeline
from latentmake.caches.pixels.scaling import Cut, Film, Key, cut
from latentmake.errors import SourceError
from latentmake.files.readers import Readers
from latentmake.geometry.clips import Clip, Span, kept_indices
from latentmake.plan.orders import Order, Work
from latentmake.progress import Progress

_CLIPS = 2  # of a thread in memory: one being made, and one that waits or is being encoded


def make_clips(
    job: Job, works: Sequence[Work], pipeline: Pipeline, threads: int, progress: Progress
) -> None:
    """Make and encode the clips of videos that a job lacks.

    Items of one file are read together, so that it is opened once. Each of the threads reads one
    file at a time.
    """
    files: dict[tuple[str | None, tuple[str, ...]], list[Work]] = {}
    for work in works:
        files.setdefault((work.item.source, work.item.controls), []).append(work)
    lock = threading.Lock()  # of `pipeline`, and of all that a job counts
    room = threading.Semaphore(_CLIPS * threads)

    def take_room() -> None:
        seconds = 0.0
        while not room.acquire(timeout=seconds):
            with lock:
                pipeline.flush()  # or clips would wait there for others, and these for room
            seconds = 1.0

    def add(samples: list[Sample]) -> None:
        releases = iter([bool] * (len(samples) - 1) + [room.release])
        with lock:
            while samples:  # no name is given to a sample: it would keep it in memory
                pipeline.add(samples.pop(0), job, lambda: next(releases)())

    def make(works: Sequence[Work]) -> None:
        readings: list[Reading] = []
        for work in works:
            readings.append(job.read(work, known=readings[-1].sources if readings else None))
        with lock:
            for each in readings:
                job.claim(each)
            places = _places(job.order, [each for each in readings if each.missing])
            for each in readings:
                job.count(each, progress)
        clips = _samples(job.order, places, readers)
        try:
            while places:
                take_room()
                add(next(clips))
        except SourceError as error:
            room.release()
            with lock:
                for each in readings:
                    if left := sum(len(place.keys) for place in places if place.reading is each):
                        progress.update(left)
                        job.fail(each.work.item, each.content, error)

    with Readers() as readers, ThreadPoolExecutor(threads) as pool:
        try:
            for made in as_completed([pool.submit(make, each) for each in files.values()]):
                made.result()
            pipeline.flush()  # or those that wait there would be in memory beside the next order's
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            readers.close()
            raise


class _Place(NamedTuple):
    """One clip of one item, and the key of its target for each size."""

    reading: Reading
    cut: Cut
    keys: list[str]


def _places(order: Order, readings: Sequence[Reading]) -> deque[_Place]:
    """Return the missing clips of items of one file, in the order of their frames."""
    found, settings, rate = list[_Place](), order.dataset_settings, order.layout.rate
    for reading in readings:
        item, size = reading.work.item, stored_size(reading.work.item)
        assert item.media is not None
        frames, timing, span = item.media.frames, item.media.timing, item.span or Span()
        kept = [x for x, _ in kept_indices(frames, settings.source_fps, span, timing, rate)]
        clips: dict[Clip, list[tuple[Key, str]]] = {}
        for target, key in reading.missing.items():
            clip, resolution = Clip(*(target.clip or (0, 1))[:2]), target.size or size
            place = (order.layout.size(size, resolution, settings), resolution)
            clips.setdefault(clip, []).append((place, key))
        for clip, pairs in clips.items():
            sizes, keys = zip(*pairs, strict=True)
            found.append(_Place(reading, Cut(kept, *clip, sizes), [*keys]))
    return deque(sorted(found, key=lambda place: place.cut.reach))


def _samples(order: Order, places: deque[_Place], readers: Readers) -> Iterator[list[Sample]]:
    """Yield the samples of each clip, and take it from `places`; raises SourceError."""
    item, sources = places[0].reading.work.item, places[0].reading.sources
    settings, original = order.dataset_settings, stored_size(item)
    limit = settings.max_image_pixels
    bucket = (order.layout.bucket_side or 0) if settings.fit == "bucket" else 0
    films = [Film(item.source or "", item.media.rotation if item.media else 0, limit)]
    films += [Film(path, 0, limit, bucket) for path in item.controls[:1]]
    cuts = [place.cut for place in places]
    streams = [readers.each(film.path, cut, film, cuts) for film in films]
    while places:
        clip, control = [*(next(stream) for stream in streams), {}][:2]
        refuse_changed([film.path for film in films], sources)
        (reading, (*_, sizes), keys) = places.popleft()
        content, item = reading.content, reading.work.item
        samples = [
            Sample(key, content, item, clip[x], original, control.get(x), clip=True)
            for x, key in zip(sizes, keys, strict=True)
        ]
        del clip, control  # or they would stay in memory while the next ones are waited for
        yield samples
