"""Batch sizes: found by trying, never beyond memory, remembered."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.caches.batch_sizes import BatchSizes, Found, Remembered

SHAPE = (512, 512, 3)
SIDES = st.sampled_from([256, 320, 512, 768, 1024])
SHAPES = st.tuples(SIDES, SIDES, st.just(3))
SIZES = [2**power for power in range(7)]


@dataclass
class Device:
    """A GPU on which n samples take `launch + sample * n` seconds, and memory likewise.

    Attributes:
        noise: by which seconds differ from that, as a share, by turns.
        hidden: bytes that a batch of two or more takes at once, and nobody can foresee.
    """

    memory: int = 80_000
    launch: float = 1.0
    sample: float = 1.0
    constant: int = 100
    each: int = 1000
    noise: float = 0.0
    hidden: int = 0
    first: float = 10.0
    sizes: list[int] = field(default_factory=list)
    failures: int = 0

    def seconds(self, count: int, scale: float = 1.0) -> float:
        return self.launch + self.sample * scale * count

    def rate(self, count: int) -> float:
        return count / self.seconds(count)

    def taken(self, count: int, scale: float = 1.0) -> int:
        return round(self.constant + self.each * scale * count) + self.hidden * (count > 1)

    def encode(self, sizes: BatchSizes, shape: tuple[int, ...] = SHAPE, batches: int = 40) -> int:
        scale = shape[0] * shape[1] / 512**2
        met = set()
        for number in range(batches):
            count = sizes.of(shape)
            self.sizes.append(count)
            if self.taken(count, scale) > self.memory:
                self.failures += 1
                sizes.out_of_memory(shape, count)
                continue
            sizes.launched(shape, count, self.taken(count, scale), self.memory)
            noise = 1 + self.noise * (-1) ** (number // 3)
            seconds = self.seconds(count, scale) * noise
            sizes.encoded(shape, count, seconds if count in met else self.first * seconds)
            met.add(count)
        return sizes.of(shape)

    def best(self) -> float:
        return max(self.rate(count) for count in SIZES if self.taken(count) <= self.memory)


SECONDS = st.floats(1e-4, 10.0)


@given(launch=st.floats(0.0, 10.0), sample=SECONDS, noise=st.sampled_from([0.0, 0.02]))
def test_a_size_near_the_fastest_is_found(launch: float, sample: float, noise: float) -> None:
    device = Device(10**9, launch, sample, noise=noise)
    size = device.encode(BatchSizes(64, free=device.memory))
    assert device.rate(size) >= (0.95 if not noise else 0.9) * device.best() * (1 - 1e-9)
    assert device.failures == 0


@given(memory=st.integers(1, 100_000), constant=st.floats(0, 4), each=st.integers(1, 20_000))
def test_no_batch_is_tried_that_would_surely_not_fit(
    memory: int, constant: float, each: int
) -> None:
    device = Device(memory, launch=100.0, constant=round(constant * each), each=each)
    size = device.encode(BatchSizes(64, free=memory))
    if device.taken(1) <= memory:
        assert device.failures == 0
        fitting = max(count for count in SIZES if device.taken(count) <= memory)
        assert fitting <= 4 * size  # what is constant may be counted twice, and there is a margin
    else:
        assert size == 1


@given(memory=st.integers(1200, 100_000), hidden=st.integers(0, 50_000))
def test_memory_runs_out_once_at_the_most_and_never_again(memory: int, hidden: int) -> None:
    device = Device(memory, launch=100.0, constant=0, hidden=hidden)
    sizes = BatchSizes(64, free=memory)
    size = device.encode(sizes)
    assert device.failures <= 1
    if device.failures:
        assert max(device.sizes) == 2 * size
        assert device.encode(sizes, batches=100) == size and device.failures == 1
    assert device.taken(size) <= memory


@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), memory=st.integers(8000, 200_000))
def test_other_shapes_begin_where_similar_ones_ended_and_fit(
    shapes: list[tuple[int, ...]], memory: int
) -> None:
    device = Device(memory, launch=3.0)
    sizes = BatchSizes(64, free=memory)
    for shape in shapes:
        device.encode(sizes, shape)
    assert device.failures == 0


def test_a_similar_shape_need_not_begin_with_one() -> None:
    device = Device(10**9, launch=10.0)
    sizes = BatchSizes(64, free=device.memory)
    assert device.encode(sizes) == 64
    assert sizes.of((512, 768, 3)) == 32 and sizes.of((4096, 4096, 3)) == 1
    assert sizes.of(()) == 1


@pytest.mark.parametrize("batches", [1, 3, 4])
@pytest.mark.parametrize("sides", [range(512, 256, -8), range(264, 520, 8)], ids=str)
def test_of_many_shapes_each_goes_on_where_the_one_before_was(sides: range, batches: int) -> None:
    device = Device(10**9, launch=1000.0)
    sizes = BatchSizes(64, free=device.memory)
    for side in sides:
        device.encode(sizes, (side, 512, 3), batches)
    assert device.sizes[-1] == (1 if batches < 3 else 64)  # a size is judged by three batches
    assert device.failures == 0


def test_batches_of_another_size_say_nothing_about_this_one() -> None:
    sizes = BatchSizes(64)
    for _ in range(10):
        sizes.encoded(SHAPE, 3, 1.0)
    assert sizes.of(SHAPE) == 1


def test_only_seconds_after_a_sizes_first_batch_count() -> None:
    slow = Device(10**9, launch=10.0, first=1000.0)
    assert slow.encode(BatchSizes(16, free=slow.memory)) == 16


def test_threads_that_tell_of_batches_at_once_agree() -> None:
    sizes, device = BatchSizes(64, free=10**9), Device(10**9, launch=20.0)
    threads = [threading.Thread(target=device.encode, args=(sizes,)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sizes.of(SHAPE) in (16, 32, 64)


# -- what is remembered ---------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".latentmake/batch_sizes.json"


def test_the_next_job_begins_with_the_size_that_was_found(path: Path) -> None:
    device = Device(10**9, launch=10.0)
    size = device.encode(BatchSizes(64, free=10**9, remembered=Remembered("h200, vae", path)))
    again = BatchSizes(64, free=10**9, remembered=Remembered("h200, vae", path))
    assert again.of(SHAPE) == size == 64
    assert BatchSizes(16, free=10**9, remembered=Remembered("h200, vae", path)).of(SHAPE) == 16
    assert BatchSizes(64, free=10**9, remembered=Remembered("a40, vae", path)).of(SHAPE) == 1
    device.sizes.clear()
    device.encode(again)
    assert set(device.sizes) == {64}


def test_a_job_with_less_memory_begins_with_less_and_one_with_more_goes_on(path: Path) -> None:
    remembered = Remembered("h200, vae", path)
    device = Device(20_000, launch=100.0, constant=0)
    assert device.encode(BatchSizes(64, free=20_000, remembered=remembered)) == 16
    assert BatchSizes(64, free=9_000, remembered=remembered).of(SHAPE) == 8
    larger = Device(10**9, launch=100.0, constant=0)
    assert larger.encode(BatchSizes(64, free=10**9, remembered=remembered)) == 64


def test_memory_that_ran_out_is_remembered(path: Path) -> None:
    remembered = Remembered("h200, vae", path)
    device = Device(20_000, launch=100.0, constant=0, hidden=19_000)
    for _ in range(2):
        assert device.encode(BatchSizes(64, free=20_000, remembered=remembered)) == 1
        assert device.failures == 1
    larger = Device(40_000, launch=100.0, constant=0, hidden=19_000)
    assert larger.encode(BatchSizes(64, free=40_000, remembered=remembered)) == 2


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{", b"[1]", b'{"gpu": 3}', b'{"gpu": {"512x512x3": [0, 1]}}', b'{"gpu": {"ax3": [4]}}',
     b'{"gpu": {"512x512x3": "8"}}', b'{"gpu": {"512x512x3": [4, -1, 0]}}', b"\xff\x00"],
)  # fmt: skip
def test_a_damaged_file_is_as_none(path: Path, damaged: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damaged)
    sizes = BatchSizes(64, free=10**9, remembered=Remembered("gpu", path))
    assert sizes.of(SHAPE) in (1, 8)
    assert Device(10**9, launch=10.0).encode(sizes) == 64
    assert json.loads(path.read_bytes())["gpu"]["512x512x3"][0] == 64


def test_jobs_of_other_encoders_keep_their_sizes_and_the_file_stays_small(path: Path) -> None:
    for number in range(70):
        sizes = {(number, number, 3): Found(2), SHAPE: Found(number + 1)}
        Remembered(f"encoder {number}", path).write(sizes)
        Remembered("one", path).write({(number, 3): Found(1)})
        Remembered("one", path).write({(number + 1000, 3): Found(1)})
    every = json.loads(path.read_bytes())
    assert len(every) == 64 and len(every["one"]) == 128
    assert Remembered("encoder 69", path).read() == {(69, 69, 3): Found(2), SHAPE: Found(70)}


def test_a_folder_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sizes = BatchSizes(4, free=10**9, remembered=Remembered("gpu", tmp_path / "file/sizes.json"))
    assert Device(10**9, launch=100.0).encode(sizes) == 4
