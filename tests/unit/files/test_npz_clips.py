"""Clips in npz files are read frame by frame, and nothing else is."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from latentmake.errors import SourceError
from latentmake.files.video import EndedError, probe, read_frames
from latentmake.geometry.clips import Media
from numpy.lib import format as npy

FRAMES = np.random.default_rng(0).integers(0, 256, (9, 12, 20, 3), dtype=np.uint8)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("named", [False, True])
def test_frames_are_those_of_the_array(save: Any, named: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    if named:
        save(path, mask=np.zeros(3), frames=FRAMES)
    else:
        save(path, FRAMES)
    for wanted in ([0], [8], [1, 2, 7], range(9)):
        found = [*read_frames(str(path), wanted)]
        assert [index for index, _ in found] == [*wanted]
        assert all(np.array_equal(pixels, FRAMES[index]) for index, pixels in found)
    assert probe(str(path)) == Media(20, 12, 9)
    with pytest.raises(EndedError) as caught:
        [*read_frames(str(path), [3, 9])]
    assert caught.value.frames == 9


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"frames": FRAMES[0]}, "holds uint8 [12, 20, 3], no clip"),
        ({"frames": FRAMES.astype(np.float32)}, "holds float32 [9, 12, 20, 3], no clip"),
        ({"frames": FRAMES[..., :1]}, "[9, 12, 20, 1], no clip"),
        ({"frames": FRAMES[:0]}, "[0, 12, 20, 3], no clip"),
        ({"frames": np.asfortranarray(FRAMES)}, "in Fortran's order, no clip"),
        ({"frames": np.array([_Evil()], object)}, "holds object [1], no clip"),
        ({"a": FRAMES, "b": FRAMES}, "holds 2 arrays, none of which is called frames"),
    ],
)
def test_what_is_no_clip_is_named_and_never_unpickled(
    arrays: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", **arrays)
    with pytest.raises(SourceError) as caught:
        [*read_frames("a.npz", [0])]
    assert what in str(caught.value) and str(caught.value).startswith("a.npz: ")
    assert not Path("touched").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, FRAMES)
    whole = path.read_bytes()
    for data in (b"", b"hello", whole[:-30], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match="is damaged or no npz file"):
            [*read_frames(str(path), range(9))]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(SourceError, match="CRC"):
        [*read_frames(str(path), range(9))]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "shape", [(10**12, 8, 8, 3), (5, 10**5, 10**5, 3), (5, 2**33, 2**31, 3), (6, 12, 20, 3)]
)
def test_a_header_that_promises_more_than_there_is_is_not_believed(
    shape: tuple[int, ...], method: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", method) as archive, archive.open("frames.npy", "w") as file:
        npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.write(bytes(5 * 12 * 20 * 3))
    with pytest.raises(SourceError, match="is too small for"):
        probe(str(path))
