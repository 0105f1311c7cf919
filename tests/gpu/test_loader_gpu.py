"""Batches in pinned memory, on their way to a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds"))

from latentmake.trainers.loop.caches import Caches, read_items
from trainer_world import make_manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("threads", [1, 2])
def test_pinned_batches_reach_the_device_as_they_were_read(tmp_path: Path, threads: int) -> None:
    torch.zeros(1, device="cuda")  # the threads start beside a device in use
    manifest = make_manifest(tmp_path, tokens=(7, 4, 5))
    caches = Caches(read_items(manifest))
    order = [[0, 2], [1, 3], [4, 0], [5]] * 20
    batches = caches.prefetched(order, threads=threads, pin=True)
    for indices, batch in zip(order, batches, strict=True):
        wanted = caches.batch(indices)
        assert list(batch.indices) == indices
        for mine, theirs in zip(batch[:3], wanted[:3], strict=True):
            assert (mine is None) == (theirs is None)
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                assert mine.is_pinned()
                assert torch.equal(mine.to("cuda", non_blocking=True).cpu(), theirs)
