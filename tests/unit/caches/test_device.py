"""What is copied to a device and back is what was given, and a CPU copies nothing."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from latentmake.caches.encoders.device import download, stacked, upload

CPU = torch.device("cpu")


def arrays(count: int, *shape: int) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def test_arrays_are_stacked_in_their_order() -> None:
    pictures = arrays(3, 8, 6, 3)
    found = stacked(pictures, CPU)
    assert found.dtype == torch.uint8 and found.shape == (3, 8, 6, 3)
    for row, picture in zip(found, pictures, strict=True):
        assert np.array_equal(row.numpy(), picture)


def test_one_clip_is_not_copied() -> None:
    (clip,) = arrays(1, 5, 8, 6, 3)
    assert stacked([clip], CPU).data_ptr() == clip.ctypes.data
    clip.flags.writeable = False  # as Pillow's are, about which torch would warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(stacked([clip], CPU).numpy()[0], clip)


def test_a_cpu_hands_tensors_on() -> None:
    values = torch.arange(4)
    assert upload(values, CPU) is values
    wait = download([values, values[:2]])
    assert wait()[0].data_ptr() == values.data_ptr()
    assert wait()[1].tolist() == [0, 1]
