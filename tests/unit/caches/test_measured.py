"""Batch sizes hear of every batch: its memory at once, its time when its results are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from item_world import inputs_of
from latentmake.caches.batch_sizes import BatchSizes
from latentmake.caches.encode import carry_out
from latentmake.caches.encoders import Loaded
from latentmake.caches.encoders.measured import measured, watch_of
from latentmake.caches.inputs import Sample
from order_world import Encoded, Encoder, order, put_image, silent

CPU = torch.device("cpu")
FREE = 10_000


def samples(count: int) -> list[Sample]:
    content = np.zeros((16, 16, 3), np.uint8)
    return [
        Sample(f"{number:064x}", "source", inputs_of(f"{number}", None, None), content, (16, 16))
        for number in range(count)
    ]


@dataclass
class Gpu:
    """A watch on a device on which a batch takes 10 seconds, and a sample 900 bytes."""

    encoder: Encoder
    waited: int = 0

    def __call__(self, device: torch.device) -> Gpu:
        return self

    def stop(self) -> tuple[int, int]:
        return 900 * len(self.encoder.batches[-1]), FREE

    def seconds(self) -> float:
        self.waited += 1
        return 10.0


def test_a_batch_is_waited_for_when_its_results_are_wanted_and_not_before() -> None:
    encoder = Encoder()
    gpu = Gpu(encoder)
    sizes = BatchSizes(64, free=FREE)
    encode = measured(encoder, sizes, CPU, gpu)
    queued = [encode(samples(1)) for _ in range(3)]
    assert len(encoder.batches) == 3 and gpu.waited == 0
    results = [list(each) for each in queued]
    assert gpu.waited == 3 and [len(each) for each in results] == [1, 1, 1]
    assert sizes.of((16, 16, 3)) == 2


def test_batches_grow_as_far_as_the_memory_that_they_were_seen_to_take() -> None:
    encoder = Encoder()
    sizes = BatchSizes(64, free=FREE)
    encode = measured(encoder, sizes, CPU, Gpu(encoder))
    for _ in range(20):
        assert len(list(encode(samples(sizes.of((16, 16, 3)))))) == len(encoder.batches[-1])
    assert len(encoder.batches[-1]) == 8  # 16 would take 14,400 bytes


def test_what_an_encoder_raises_is_raised_at_once_and_counts_for_nothing() -> None:
    sizes = BatchSizes(64)

    def full(_: list[Sample]) -> list[object]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        measured(full, sizes, CPU)(samples(2))  # type: ignore[arg-type]
    assert sizes.of((16, 16, 3)) == 1


def test_a_cpus_watch_stops_where_it_is_told_to() -> None:
    watch = watch_of(CPU)
    assert watch.stop() == (0, 0)
    seconds = watch.seconds()
    assert seconds >= 0 and watch.seconds() == seconds


@pytest.mark.parametrize("fits", [100, 4])
def test_the_batches_of_a_job_grow_until_memory_runs_out_and_never_again(
    fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tried: list[int] = []

    class Full(Encoder):
        def __call__(self, samples: list[Sample]) -> Encoded:
            tried.append(len(samples))
            if len(samples) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().__call__(samples)

    encoder = Full()
    sizes = BatchSizes(8, free=1_000_000)
    loaded = Loaded(
        measured(encoder, sizes, CPU, Gpu(encoder)), 1, workers=3, queues=True, sizes=sizes
    )
    images = {
        f"{number:03}": put_image(Path(f"data/{number:03}.png"), (number, 200, 3))
        for number in range(120)
    }
    receipt = carry_out(
        order("latents", images), Path("receipt.json"), say=silent, threads=2, encoder=loaded
    )
    assert receipt.counts["encoded"] == 120
    assert sorted(encoder.stems) == sorted(images)
    assert max(len(batch) for batch in encoder.batches) == min(fits, 8)
    # Other workers may hold a batch of the size that ran out; none is collected any more.
    assert sum(count > fits for count in tried) in (range(1, 4) if fits < 8 else [0])
