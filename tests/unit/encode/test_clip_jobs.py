"""Clips are made while they are encoded: few at a time, each frame once, faults by name."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
from clip_world import SIZE, Encoder, check_caches, item_of, order_of, whole
from latentmake.base.errors import SourceError
from latentmake.encode.pixels.scaling import cut
from latentmake.encode.reading import Loaded, Sample
from latentmake.formats.readers import Readers
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Span
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt
from numpy.typing import NDArray
from order_world import carry_out, silent
from video_world import write_video

SMALL = Size(32, 32)
BEFORE: set[int] = set()  # processes of other tests


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each.pid not in BEFORE]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BEFORE.update(each.pid for each in psutil.Process().children())


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("films") / "film.mp4"
    return write_video(path, "libx264", 120, g="12", bf="3")


def carry(work: Order, encoder: Encoder, *, batch: int = 1, **options: Any) -> Receipt:
    ready = Loaded(encoder, batch)
    say = options.pop("say", silent)
    return carry_out(work, say=say, encoder=ready, **options)


def scaled(frame: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Bring a frame of 64 x 48 to its own size or to 32 x 32, by the rules of musubi-tuner."""
    if size == SIZE:
        return frame
    assert size == SMALL
    return cv2.resize(frame, (43, 32), interpolation=cv2.INTER_AREA)[:, 5:37]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What processes are asked for, in turn: functions with their arguments."""
    found: list[tuple[Any, ...]] = []
    iterate = Readers.iterate

    def noting(self: Readers, path: str, *what: Any) -> Iterator[Any]:
        found.append(what)
        return iterate(self, path, *what)

    monkeypatch.setattr(Readers, "iterate", noting)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "chunk": {"target_frames": [9]},
    "slide": {"target_frames": [9], "frame_extraction": "slide", "frame_stride": 4},
    "lengths": {"target_frames": [1, 5, 13], "frame_extraction": "slide", "frame_stride": 6},
}


@pytest.mark.parametrize(("way", "threads"), [("chunk", 2), ("slide", 1), ("lengths", 1)])
def test_clips_of_all_items_of_a_film_are_those_of_a_full_decode_by_one_reading(
    way: str, threads: int, film: Path, asked: list[tuple[Any, ...]]
) -> None:
    spans = {"first": Span(0, 60), "second": Span(60, 30, 2)}
    items = [
        item_of(stem, film, sizes=(SIZE, SMALL), **WAYS[way], span=span)
        for stem, span in spans.items()
    ]
    receipt = carry(order_of(*items), Encoder(), threads=threads)
    frames = whole(film)
    made = sum(check_caches(item, frames, scaled) for item in items)
    assert receipt.counts["encoded"] == made == sum(len(item.targets) for item in items)
    assert [what[0] for what in asked] == [cut]


@pytest.mark.parametrize(
    ("way", "batch", "threads"), [("chunk", 3, 2), ("slide", 4, 1), ("lengths", 1, 2)]
)
def test_two_clips_a_thread_are_in_memory_and_no_more(
    way: str, batch: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    films = [write_video(tmp_path / f"{n}.mkv", "mpeg4", 40 + n, size=(16, 16)) for n in range(3)]
    items = [item_of(path.stem, path, sizes=(SMALL,), **WAYS[way]) for path in films]
    iterate, clips, counts = Readers.iterate, list[weakref.ref[Any]](), []

    def noted(self: Readers, path: str, *what: Any) -> Iterator[Any]:
        for clip in iterate(self, path, *what):
            clips.extend(map(weakref.ref, clip.values()))
            yield clip
            del clip

    def count(_: list[Sample]) -> None:
        time.sleep(0.002)  # so that clips wait
        counts.append(sum(clip() is not None for clip in clips))

    monkeypatch.setattr(Readers, "iterate", noted)
    encoder = Encoder(count)
    carry(order_of(*items), encoder, batch=batch, threads=threads)
    assert len(encoder.stems) == sum(len(item.targets) for item in items)
    assert 1 <= max(counts) <= 2 * threads


def test_a_batch_larger_than_all_room_stops_nothing(film: Path) -> None:
    item = item_of("a", film, **WAYS["slide"], sizes=(SIZE, SMALL))
    encoder = Encoder()
    carry(order_of(item), encoder, batch=16)
    assert len(encoder.stems) == len(item.targets)
    assert max(encoder.batches) <= 2


def test_what_was_encoded_before_the_job_died_is_kept(film: Path) -> None:
    item = item_of("a", film, **WAYS["chunk"])
    seen: list[str] = []

    def dies(samples: list[Sample]) -> None:
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.extend(sample.key for sample in samples)

    with pytest.raises(KeyboardInterrupt):
        carry(order_of(item), Encoder(dies), threads=2)
    assert "clips" not in {thread.name for thread in threading.enumerate()}
    assert not children()
    again = Encoder()
    assert carry(order_of(item), again).counts["kept"] == 7
    assert len(again.stems) == len(item.targets) - 7
    check_caches(item, whole(film), scaled)


def several(folder: Path, count: int = 4) -> dict[str, Path]:
    return {
        stem: write_video(folder / f"{stem}.mp4", "libx264", 40, preset="ultrafast", g=str(8 + n))
        for n, stem in enumerate("abcdefgh"[:count])
    }


def broken(path: Path) -> str:
    """Damage a video at its 25th frame; return its fault."""
    import av

    with av.open(str(path)) as file:
        places = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    begin, size = places[24]
    data[begin + 8 : begin + size] = bytes(size - 8)
    path.write_bytes(data)
    return f"{path}: is damaged"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_video_is_named_and_the_others_are_finished(threads: int, tmp_path: Path) -> None:
    films = several(tmp_path)
    items = {stem: item_of(stem, path, target_frames=[5]) for stem, path in films.items()}
    fault = broken(films["b"])
    films["d"].write_text("hello" * 100)
    with pytest.raises(SourceError) as caught:
        carry(order_of(*items.values()), Encoder(), threads=threads)
    line = str(caught.value)
    assert line.startswith("2 of 4 items are faulty: ") and "\n" not in line
    receipt = carry(order_of(*items.values(), on_error="skip"), again := Encoder())
    lines = {each["stem"]: each["line"] for each in receipt.faults}
    assert {*lines} == {"b", "d"}
    assert fault in lines["b"] and f"{films['d']}: is not a video" in lines["d"]
    assert set(again.stems) <= {"b"}  # the others lie there
    for stem in "ac":
        check_caches(items[stem], whole(films[stem]), scaled)
    assert not [*Path("cache").glob("d_*")]


def test_a_video_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    films = several(tmp_path, 2)
    items = {stem: item_of(stem, path, target_frames=[5]) for stem, path in films.items()}
    changed: list[str] = []

    def change(samples: list[Sample]) -> None:
        if not changed:
            changed.append(samples[0].key)
            films["a"].write_bytes(films["a"].read_bytes() + b"more")

    with pytest.raises(SourceError, match=r"a\.mp4: was changed while it was read"):
        carry(order_of(*items.values()), Encoder(change))
    assert carry(order_of(items["b"]), Encoder()).counts["kept"] == len(items["b"].targets)
