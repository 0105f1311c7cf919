"""Clips of videos: threads cut them while others are encoded, so that memory holds only a few."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count

from latentmake.base.errors import SourceError
from latentmake.base.progress import Progress
from latentmake.encode.job import Job
from latentmake.encode.pipeline import Pipeline
from latentmake.encode.pixels.scaling import Cut, Film, Key, cut
from latentmake.encode.reading import Reading, Sample, refuse_changed, stored_size
from latentmake.formats.readers import Readers
from latentmake.geometry.clips import Clip
from latentmake.plan.orders import Order, Work

_CLIPS = 2  # clips in memory per thread: one being cut, and one that waits or is being encoded


def make_clips(
    job: Job, works: Sequence[Work], pipeline: Pipeline, threads: int, progress: Progress
) -> None:
    """Cut and encode the missing clips of a job's videos.

    Items that share a file are read together, so that the file is opened once. A thread reads one
    file at a time.
    """
    files: dict[tuple[str | None, tuple[str, ...]], list[Work]] = {}
    for work in works:
        files.setdefault((work.item.source, work.item.controls), []).append(work)
    lock = threading.Lock()  # guards `pipeline` and the counts of the job
    room = threading.Semaphore(_CLIPS * threads)

    def take_room() -> None:
        seconds = 0.0
        while not room.acquire(timeout=seconds):
            with lock:
                # Clips that wait for others to fill their batch keep their room. Without the flush
                # the batch would wait for clips, and the clips for room.
                pipeline.flush()
            seconds = 1.0

    def add(samples: list[Sample]) -> None:
        others = count(len(samples) - 1, -1)  # samples of the clip that are not encoded yet

        def release() -> None:
            if next(others) == 0:
                room.release()

        with lock:
            while samples:  # a variable for the sample would keep its pixels in memory
                pipeline.add(samples.pop(0), job, release)

    def make(works: Sequence[Work]) -> None:
        readings: list[Reading] = []
        for work in works:
            # All items here share their files, so a file that was read is not digested again.
            readings.append(job.read(work, sources=readings[-1].sources if readings else None))
        with lock:
            for reading in readings:
                job.count(reading, progress)
            places = _places(job.order, [reading for reading in readings if reading.missing])
        clips = _samples(job.order, places, readers)
        try:
            while places:
                take_room()
                add(next(clips))
        except SourceError as error:
            room.release()
            with lock:
                for reading in readings:
                    left = sum(len(keys) for other, _, keys in places if other is reading)
                    if left:
                        progress.update(left)
                        job.fail(reading.work.item, reading.content, error)

    with Readers() as readers, ThreadPoolExecutor(threads) as pool:
        try:
            for future in as_completed([pool.submit(make, works) for works in files.values()]):
                future.result()
            # Otherwise the waiting clips would stay in memory beside those of the next order.
            pipeline.flush()
        except BaseException:
            # Threads may wait for a decoder: closing the readers ends them.
            pool.shutdown(wait=False, cancel_futures=True)
            readers.close()
            raise


_Place = tuple[Reading, Cut, list[str]]
"""One clip of one item: its frames and sizes, and the key of its target for each size."""


def _places(order: Order, readings: Sequence[Reading]) -> deque[_Place]:
    """Return the missing clips of items that share a file, in the order of their frames."""
    places: list[_Place] = []
    for reading in readings:
        item, size = reading.work.item, stored_size(reading.work.item)
        kept = item.indices(order.dataset_settings.source_fps, order.layout.rate)
        clips: dict[Clip, list[tuple[Key, str]]] = {}
        for target, key in reading.missing.items():
            clip = Clip(*target.clip[:2]) if target.clip else Clip(0, 1)
            scaled = reading.places[target].target, target.size or size
            clips.setdefault(clip, []).append((scaled, key))
        for clip, scaled_keys in clips.items():
            sizes, keys = zip(*scaled_keys, strict=True)
            places.append((reading, Cut(kept, *clip[:2], sizes), [*keys]))
    return deque(sorted(places, key=lambda place: place[1].reach))


def _samples(order: Order, places: deque[_Place], readers: Readers) -> Iterator[list[Sample]]:
    """Yield the samples of each clip, and remove the clip from `places`; raises SourceError."""
    first = places[0][0]
    item, settings, original = first.work.item, order.dataset_settings, stored_size(first.work.item)
    limit = settings.max_image_pixels
    bucket = (order.layout.bucket_side or 0) if settings.fit == "bucket" else 0
    films = [Film(item.source or "", item.media.rotation if item.media else 0, limit)]
    films += [Film(path, 0, limit, bucket) for path in item.controls[:1]]
    cuts = [place[1] for place in places]
    streams = [readers.iterate(film.path, cut, film, cuts) for film in films]
    while places:
        clip = next(streams[0])
        control = next(streams[1]) if len(streams) > 1 else {}
        refuse_changed([film.path for film in films], first.sources)
        reading, (*_, sizes), keys = places.popleft()
        content, item = reading.content, reading.work.item
        samples = [
            Sample(key, content, item, clip[size], original, control.get(size))
            for size, key in zip(sizes, keys, strict=True)
        ]
        del clip, control  # otherwise they would stay in memory until the next clip comes
        yield samples
