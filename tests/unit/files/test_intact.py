"""A file that is as it was written is known by one look at each of its bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from latentmake.files import cachefile, npz
from latentmake.files.intact import read_intact

KEY = "k" * 64
STAMP = cachefile.stamp(key=KEY, source="s", recipe={"vae": "v"})
SIZES = (1, 3, 1 << 10, (1 << 16) - 7, (1 << 16) + 1, (1 << 18) + 3)


def written(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    if path.suffix == ".npz":
        data = npz.serialize({name: each.numpy() for name, each in tensors.items()}, STAMP)
    else:
        data = cachefile.serialize(tensors, STAMP | {"caption": "a cat"})
    path.write_bytes(data)
    return len(data)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("values", [False, True])
def test_files_of_any_size_are_read_at_once(
    tmp_path: Path, kind: str, dtype: torch.dtype, values: bool
) -> None:
    path = tmp_path / f"a.{kind}"
    for length in SIZES:
        for second in (0, 5, 1 << 17):
            tensors = {
                "a": (torch.arange(length) % 1000 - 500).to(dtype) + 1,
                "b": torch.arange(second, dtype=torch.float32) - 2,
                "c": torch.arange(3),
            }
            if length == 1 and dtype.is_floating_point:
                tensors["a"] = -tensors["a"]
            size = written(path, tensors)
            assert read_intact(path, KEY, values=values) == size
            assert read_intact(path) == size
            assert read_intact(path, "another") is None


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
@pytest.mark.parametrize("place", [0, (1 << 16) - 40, 1 << 16, 100_000, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(
    tmp_path: Path, kind: str, place: int, value: float
) -> None:
    path = tmp_path / f"a.{kind}"
    tensor = torch.arange(150_000, dtype=torch.float32)
    tensor[place] = value
    size = written(path, {"a": tensor, "b": torch.arange(9.0)})
    assert read_intact(path, KEY) == size
    assert read_intact(path, KEY, values=True) is None


def test_what_is_no_file_of_ours_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "empty"):
        assert read_intact(path) is None
    with pytest.raises(FileNotFoundError):
        read_intact(tmp_path / "missing")
