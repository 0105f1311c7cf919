"""An npz file of ours is the same for the same content, known to be whole, and one of numpy's."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import xxhash
from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile, npz
from latentmake.files.cachefile import Header

ARRAYS = {
    "latents": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "original_size": np.array((40, 36)),
    "apply_t5_attn_mask": np.array(False),
}
RECIPE: dict[str, object] = {"format": 1, "layout": "sdscripts"}
STAMP = cachefile.stamp(key="k" * 64, source="s" * 64, recipe=RECIPE)
WHOLE = npz.serialize(ARRAYS, STAMP)
MEMBERS = xxhash.xxh3_128()
with zipfile.ZipFile(io.BytesIO(WHOLE)) as found:
    for member in found.infolist():
        MEMBERS.update(found.read(member))
HEADER = Header(
    "k" * 64, "s" * 64, digest.of_value(RECIPE), checksum=f"xxh3_128:{MEMBERS.hexdigest()}"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "ant_0040x0036_sdxl.npz"


# -- content --------------------------------------------------------------------------------------


def test_the_same_content_gives_the_same_bytes_whatever_the_clock_and_the_order() -> None:
    for names in permutations(ARRAYS):
        assert npz.serialize({name: ARRAYS[name] for name in names}, STAMP) == WHOLE
    assert digest.of_bytes(WHOLE) == (
        "ca62577374f6f1e08c93cac6738c6fd2f8931dc610c8fe80996ecca4a459c770"
    )


def test_numpy_reads_what_is_written(path: Path) -> None:
    atomic.write(path, WHOLE)
    with np.load(path, allow_pickle=False) as found:
        assert set(found.files) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert np.array_equal(found[name], array)


def test_every_array_is_stored_uncompressed_and_none_needs_zip64(path: Path) -> None:
    atomic.write(path, WHOLE)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {entry.extract_version for entry in archive.infolist()} == {20}


def test_an_array_that_is_a_view_is_written_as_its_values(path: Path) -> None:
    turned = np.arange(6.0).reshape(2, 3).T
    atomic.write(path, npz.serialize({"x": turned}, {}))
    with np.load(path) as found:
        assert np.array_equal(found["x"], turned)


def test_metadata_that_an_archive_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than an archive takes"):
        npz.serialize(ARRAYS, {"caption": "x" * 70_000})


# -- reading --------------------------------------------------------------------------------------


def test_a_header_says_what_the_file_was_made_from_under_either_name(path: Path) -> None:
    atomic.write(path, WHOLE)
    spooled = path.with_name("key.safetensors")
    os.link(path, spooled)
    assert cachefile.read_header(path) == HEADER
    assert cachefile.read_header(str(path)) == HEADER
    assert cachefile.read_header(spooled) == HEADER


def test_a_comment_longer_than_one_read_is_read_whole(path: Path) -> None:
    atomic.write(path, npz.serialize(ARRAYS, STAMP | {"note": "word " * 3000}))
    assert cachefile.read_header(path) == HEADER


def test_a_file_that_lost_its_beginning_or_middle_is_found_damaged(path: Path) -> None:
    for data in (WHOLE[1:], WHOLE[:100] + WHOLE[101:]):
        atomic.write(path, data)
        with pytest.raises(CacheError):
            cachefile.read_header(path)


def test_a_file_that_numpy_wrote_again_is_no_longer_ours(path: Path) -> None:
    atomic.write(path, WHOLE)
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    np.savez(path, **arrays)
    with pytest.raises(CacheError, match="was not made by latentmake"):
        cachefile.read_header(path)


def test_a_safetensors_file_under_an_npz_name_is_no_npz(path: Path) -> None:
    atomic.write(path, struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CacheError, match="no npz file"):
        cachefile.read_header(path)


def test_a_larger_archive_than_32_bits_can_say_is_read(path: Path) -> None:
    # The same archive, its directory described as one of more than 4 GB is.
    end = WHOLE.rfind(b"PK\x05\x06")
    (size, offset) = struct.unpack_from("<LL", WHOLE, end + 12)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, size, offset)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    short = WHOLE[end : end + 12] + b"\xff" * 8 + WHOLE[end + 20 :]
    atomic.write(path, WHOLE[:end] + record + locator + short)
    with np.load(path) as found:
        assert np.array_equal(found["latents"], ARRAYS["latents"])
    assert cachefile.read_header(path) == HEADER


def test_the_recipe_is_told_by_either_kind_of_file_and_by_no_other(path: Path) -> None:
    atomic.write(path, WHOLE)
    assert cachefile.read_recipe(path) == RECIPE
    plain = path.with_suffix(".safetensors")
    atomic.write(plain, cachefile.serialize({}, STAMP))
    assert cachefile.read_recipe(plain) == RECIPE
    for damaged in (path, plain):
        damaged.write_bytes(b"neither")
        assert cachefile.read_recipe(damaged) == {}
        damaged.unlink()
        assert cachefile.read_recipe(damaged) == {}
