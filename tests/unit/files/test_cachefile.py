"""A cache file is whole or not there, the same for the same content, and says what made it."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile, npz
from latentmake.files.cachefile import KEY, RECIPE, SOURCE, Header, read_metadata, recipe_of
from safetensors import safe_open
from safetensors.torch import load, save_file

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.arange(4, dtype=torch.float16),
    "c": torch.tensor([1, 2], dtype=torch.bfloat16),
}
ARRAYS = {
    "latents": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "original_size": np.array((40, 36)),
    "apply_t5_attn_mask": np.array(False),
}
RECIPE_VALUES: dict[str, object] = {"format": 1, "layout": "sdscripts"}
STAMP = cachefile.stamp(key="k" * 64, source="s" * 64, recipe=RECIPE_VALUES)
WHOLE = cachefile.serialize(TENSORS, STAMP | {"caption": "a café ☕"})
BODY = WHOLE[8 + int.from_bytes(WHOLE[:8], "little") :]
ARCHIVE = npz.serialize(ARRAYS, STAMP)
with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as archive:
    MEMBERS = b"".join(map(archive.read, archive.namelist()))
SUMS = {
    whole: f"xxh3_128:{xxhash.xxh3_128_hexdigest(body)}"
    for whole, body in ((WHOLE, BODY), (ARCHIVE, MEMBERS))
}
HEADER = Header("k" * 64, "s" * 64, digest.of_value(RECIPE_VALUES))
FORMATS = pytest.mark.parametrize("whole", [WHOLE, ARCHIVE], ids=["safetensors", "npz"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "file.safetensors"


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "ant_0040x0036_sdxl.npz"


def seal_of(data: bytes, seal: str) -> str:
    header = data[8 : len(data) - len(BODY)]
    return xxhash.xxh3_64_hexdigest(header.replace(seal[8:].encode(), b"0" * 16))


# -- content --------------------------------------------------------------------------------------


def test_the_order_of_tensors_and_metadata_changes_no_byte() -> None:
    metadata = STAMP | {"caption": "x", "height": "64"}
    expected = cachefile.serialize(TENSORS, metadata)
    for names in permutations(TENSORS):
        for keys in (sorted(metadata), sorted(metadata, reverse=True)):
            tensors = {name: TENSORS[name] for name in names}
            assert cachefile.serialize(tensors, {key: metadata[key] for key in keys}) == expected


def test_safetensors_reads_what_is_written(path: Path) -> None:
    atomic.write(path, WHOLE)
    with safe_open(path, "pt") as file:
        found = file.metadata()
        seal = found["latentmake.header_checksum"]
        sums = {cachefile.CHECKSUM: SUMS[WHOLE], "latentmake.header_checksum": seal}
        assert found == STAMP | {"caption": "a café ☕"} | sums
        assert seal == f"xxh3_64:{seal_of(WHOLE, seal)}" and seal[8:] != "0" * 16
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name), tensor)


def test_tensors_begin_at_a_multiple_of_eight() -> None:
    for length in range(17):
        data = cachefile.serialize(TENSORS, {"caption": "x" * length})
        (header,) = struct.unpack_from("<Q", data)
        assert (8 + header) % 8 == 0


def test_a_tensor_that_is_a_view_is_written_as_its_values() -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(load(cachefile.serialize({"x": turned}, {}))["x"], turned)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
)
def test_any_metadata_survives(metadata: dict[str, str]) -> None:
    data = cachefile.serialize({"x": torch.ones(1)}, metadata)
    (length,) = struct.unpack_from("<Q", data)
    assert json.loads(data[8 : 8 + length])["__metadata__"] == metadata
    assert torch.equal(load(data)["x"], torch.ones(1))


def test_a_key_tells_source_recipe_and_resolution_apart() -> None:
    keys = {
        cachefile.target_key(source, recipe, resolution)
        for source in ("a", "b")
        for recipe in ("a", "b")
        for resolution in ("", "64", "64x96")
    }
    assert len(keys) == 12


# -- reading the header ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "name"),
    [(WHOLE, "a.safetensors"), (WHOLE, "a"), (ARCHIVE, "a.npz"), (ARCHIVE, "a.safetensors")],
)
def test_a_header_says_what_the_file_was_made_from_under_any_name(
    tmp_path: Path, whole: bytes, name: str
) -> None:
    (path := tmp_path / name).write_bytes(whole)
    expected = HEADER._replace(checksum=SUMS[whole])
    assert cachefile.read_header(path) == cachefile.read_header(str(path)) == expected


def test_a_header_longer_than_one_read_is_read_whole(path: Path) -> None:
    stamp = STAMP | {"caption": "word " * 3000}
    for data in (cachefile.serialize(TENSORS, stamp), npz.serialize(ARRAYS, stamp)):
        atomic.write(path, data)
        assert cachefile.read_header(path)._replace(checksum="") == HEADER


@FORMATS
@pytest.mark.parametrize("name", ["cut.npz", "cut"])
def test_a_file_cut_anywhere_is_found_damaged(tmp_path: Path, name: str, whole: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(whole)
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(CacheError):
            cachefile.read_header(path)


@FORMATS
@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_a_file_that_has_grown_is_found_damaged(whole: bytes, tail: bytes) -> None:
    check(whole + tail, refuse)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_cache_file(data: bytes) -> None:
    check(data, refuse)


@FORMATS
@settings(deadline=None)
@given(st.integers(8, len(ARCHIVE) - 1), st.integers(0, 255))
def test_a_changed_byte_never_stops_the_reader(whole: bytes, place: int, value: int) -> None:
    data = bytearray(whole)
    data[place % len(whole)] = value

    def read(path: Path) -> None:
        try:
            header = cachefile.read_header(path)
        except CacheError as error:
            assert str(error).startswith(str(path))
        else:
            assert header.picture is None
            assert all(isinstance(each, str) for each in header if each is not None)

    check(bytes(data), read)


def check(data: bytes, read: Callable[[Path], object]) -> None:
    """Put some bytes into a file and look at it; one file serves all examples."""
    path = Path(f"/tmp/latentmake-test-{os.getpid()}")
    path.write_bytes(data)
    try:
        read(path)
    finally:
        path.unlink()


def refuse(path: Path) -> None:
    with pytest.raises(CacheError):
        cachefile.read_header(path)


def with_header(header: object, tail: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tail


@pytest.mark.parametrize(
    "data",
    [
        with_header([]),
        with_header(5),
        with_header({}),
        with_header({"__metadata__": None}),
        with_header({"__metadata__": {KEY: 1, RECIPE: "r", SOURCE: "s"}}),
        with_header({"__metadata__": {KEY: "k", RECIPE: "r"}}),
        with_header({"x": 5, "__metadata__": {}}),
        with_header({"x": {"data_offsets": [0]}}),
        with_header({"x": {"data_offsets": [0, 8]}}, bytes(7)),
        with_header({"x": {"data_offsets": [0, 1e400]}}),
        with_header({"__metadata__": {KEY: "k", RECIPE: "\ud800", SOURCE: "s"}}),
        with_header(b"[" * 60_000),
        with_header(b"\xff\xfe{}"),
        with_header(b"") + b"x",
        struct.pack("<Q", 2**63) + b"{}",
        b"",
    ],
    ids=range(16),
)
def test_a_hostile_header_is_one_line_and_no_traceback(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(data)
    with pytest.raises(CacheError) as caught:
        cachefile.read_header(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_safetensors_file_of_others_is_not_ours(path: Path) -> None:
    path.parent.mkdir()
    save_file(TENSORS, path, {"architecture": "wan"})
    with pytest.raises(CacheError, match="was not made by latentmake"):
        cachefile.read_header(path)


def test_a_missing_file_is_missing_and_not_damaged(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cachefile.read_header(path)


# -- npz files ------------------------------------------------------------------------------------


def test_the_same_content_gives_the_same_bytes_whatever_the_clock_and_the_order() -> None:
    for names in permutations(ARRAYS):
        assert npz.serialize({name: ARRAYS[name] for name in names}, STAMP) == ARCHIVE
    assert digest.of_bytes(ARCHIVE) == (
        "ca62577374f6f1e08c93cac6738c6fd2f8931dc610c8fe80996ecca4a459c770"
    )


def test_numpy_reads_what_is_written(archived: Path) -> None:
    atomic.write(archived, ARCHIVE)
    with np.load(archived, allow_pickle=False) as found:
        assert set(found.files) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert np.array_equal(found[name], array)


def test_every_array_is_stored_uncompressed_and_none_needs_zip64(archived: Path) -> None:
    atomic.write(archived, ARCHIVE)
    with zipfile.ZipFile(archived) as archive:
        assert archive.testzip() is None
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {entry.extract_version for entry in archive.infolist()} == {20}


def test_metadata_that_an_archive_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than an archive takes"):
        npz.serialize(ARRAYS, {"caption": "x" * 70_000})


def test_a_file_that_lost_its_beginning_or_middle_is_found_damaged(archived: Path) -> None:
    for data in (ARCHIVE[1:], ARCHIVE[:100] + ARCHIVE[101:]):
        atomic.write(archived, data)
        with pytest.raises(CacheError):
            cachefile.read_header(archived)


def test_a_file_that_numpy_wrote_again_is_no_longer_ours(archived: Path) -> None:
    atomic.write(archived, ARCHIVE)
    with np.load(archived) as found:
        arrays = {name: found[name] for name in found.files}
    np.savez(archived, **arrays)
    with pytest.raises(CacheError, match="was not made by latentmake"):
        cachefile.read_header(archived)


def test_a_safetensors_file_under_an_npz_name_is_no_npz(archived: Path) -> None:
    atomic.write(archived, struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CacheError, match="no npz file"):
        cachefile.read_header(archived)


def test_the_recipe_is_told_by_either_kind_of_file_and_by_no_other(archived: Path) -> None:
    atomic.write(archived, ARCHIVE)
    assert recipe_of(read_metadata(archived)) == RECIPE_VALUES
    plain = archived.with_suffix(".safetensors")
    atomic.write(plain, cachefile.serialize({}, STAMP))
    assert recipe_of(read_metadata(plain)) == RECIPE_VALUES
    for damaged in (archived, plain):
        damaged.write_bytes(b"neither")
        assert recipe_of(read_metadata(damaged)) == {}
        damaged.unlink()
        assert recipe_of(read_metadata(damaged)) == {}
