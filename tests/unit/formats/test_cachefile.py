"""A cache file is whole or not there, the same for the same content, and says what made it.

Any change of it is found and named, and nothing is said of a sound one.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import xxhash
from damage_world import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.base import atomic, digest
from latentmake.base.errors import CacheError
from latentmake.formats import cachefile, npz
from latentmake.formats.cachefile import (
    FOREIGN,
    KEY,
    RECIPE,
    SOURCE,
    Header,
    read_metadata,
    recipe_of,
)
from latentmake.formats.integrity import Checked, verify
from latentmake.formats.safetensors import DTYPES, PLACEHOLDERS, checksum, parse_head
from safetensors import safe_open
from safetensors.torch import load, save

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
OLD = {name: STAMP[name] for name in STAMP.keys() - PLACEHOLDERS.keys()}
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


@contextmanager
def file_of(data: bytes, ending: str = "") -> Iterator[Path]:
    """Put some bytes into a file; one serves all examples."""
    path = Path(f"/tmp/latentmake-test-{os.getpid()}{ending}")
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()


def refuse(path: Path) -> None:
    """Check that a file is refused in one line."""
    with pytest.raises(CacheError) as caught:
        cachefile.read_header(path)
    assert str(caught.value).startswith(f"{path}: ")


def seal_of(data: bytes, seal: str) -> str:
    header = data[8 : len(data) - len(BODY)]
    return xxhash.xxh3_64_hexdigest(header.replace(seal[8:].encode(), b"0" * 16))


def test_the_order_of_tensors_and_metadata_changes_no_byte() -> None:
    metadata = STAMP | {"caption": "x", "height": "64"}
    expected = cachefile.serialize(TENSORS, metadata)
    for names in permutations(TENSORS):
        for keys in (sorted(metadata), sorted(metadata, reverse=True)):
            tensors = {name: TENSORS[name] for name in names}
            assert cachefile.serialize(tensors, {key: metadata[key] for key in keys}) == expected


def test_safetensors_reads_the_metadata(path: Path) -> None:
    atomic.write(path, WHOLE)
    with safe_open(path, "pt") as file:
        found = file.metadata()
        seal = found["latentmake.header_checksum"]
        sums = {cachefile.CHECKSUM: SUMS[WHOLE], "latentmake.header_checksum": seal}
        assert found == STAMP | {"caption": "a café ☕"} | sums
        assert seal == f"xxh3_64:{seal_of(WHOLE, seal)}" and seal[8:] != "0" * 16


def test_tensors_are_written_as_safetensors_itself_writes_them() -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    tensors = {"view": turned, "empty": turned[:0], "one": torch.tensor(3)}
    for number, dtype in enumerate(DTYPES.values()):
        kind = getattr(torch, dtype)
        tensors |= {f"{number}.b": turned.to(kind), f"{9 - number}.a": torch.ones(3).to(kind)}
    plain = save({name: each.contiguous() for name, each in tensors.items()})
    data = cachefile.serialize(tensors, {})
    heads = parse_head(data), parse_head(plain)
    assert [*heads[0].entries.items()] == [*heads[1].entries.items()]
    assert data[len(heads[0].data) :] == plain[len(heads[1].data) :]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
)
def test_any_metadata_survives(metadata: dict[str, str]) -> None:
    data = cachefile.serialize({"x": torch.ones(1)}, metadata)
    head = parse_head(data)
    assert (len(head.data) % 8, head.metadata) == (0, metadata)
    assert torch.equal(load(data)["x"], torch.ones(1))


@pytest.mark.parametrize(
    ("whole", "name"),
    [(WHOLE, "a.safetensors"), (WHOLE, "a"), (ARCHIVE, "a.npz"), (ARCHIVE, "a.safetensors")],
)
def test_a_header_says_what_the_file_was_made_from_under_any_name(
    tmp_path: Path, whole: bytes, name: str
) -> None:
    (path := tmp_path / name).write_bytes(whole)
    caption = "a café ☕" if whole is WHOLE else None
    expected = HEADER._replace(checksum=SUMS[whole], caption=caption)
    assert cachefile.read_header(path) == cachefile.read_header(str(path)) == expected
    assert verify(path) == Checked(None, expected, RECIPE_VALUES)


def test_a_file_of_an_older_release_has_no_checksum(path: Path) -> None:
    for data in (cachefile.serialize(TENSORS, OLD), npz.serialize(ARRAYS, OLD)):
        atomic.write(path, data)
        assert verify(path) == Checked(None, HEADER, RECIPE_VALUES)
        assert not verify(path).has_checksum
    atomic.write(path, WHOLE)
    assert verify(path).has_checksum


def test_a_header_longer_than_one_read_is_read_whole(path: Path) -> None:
    stamp = STAMP | {"caption": "word " * 3000}
    for data in (cachefile.serialize(TENSORS, stamp), npz.serialize(ARRAYS, stamp)):
        atomic.write(path, data)
        expected = HEADER._replace(caption=stamp["caption"])
        assert cachefile.read_header(path)._replace(checksum="") == expected


@FORMATS
@pytest.mark.parametrize("name", ["cut.npz", "cut"])
def test_a_file_cut_anywhere_is_found_damaged(tmp_path: Path, name: str, whole: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(whole)
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        refuse(path)
        assert verify(path).damage is not None, length
        if length in (0, len(whole) // 2, len(whole) - 1):
            assert str(verify(path).damage).startswith("is cut short"), length


@FORMATS
@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_a_file_that_has_grown_is_found_damaged(whole: bytes, tail: bytes) -> None:
    with file_of(whole + tail) as path:
        refuse(path)


@FORMATS
def test_any_flipped_bit_is_found_and_never_stops_the_reader(whole: bytes) -> None:
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        with file_of(bytes(changed)) as path:
            assert verify(path).damage is not None, place
            try:
                header = cachefile.read_header(path)
            except CacheError as error:
                assert str(error).startswith(str(path))
            else:
                assert header.picture is None
                assert all(isinstance(each, str) for each in header if each is not None)


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
        ARCHIVE[1:],
        ARCHIVE[:100] + ARCHIVE[101:],
    ],
    ids=range(18),
)
def test_a_hostile_header_is_one_line_and_no_traceback(data: bytes) -> None:
    for ending in ("", ".npz"):
        with file_of(data, ending) as path:
            refuse(path)


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


def test_metadata_that_an_archive_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than an archive takes"):
        npz.serialize(ARRAYS, {"caption": "x" * 70_000})


def test_the_recipe_is_told_by_either_kind_of_file_and_by_no_other(archived: Path) -> None:
    atomic.write(archived, ARCHIVE)
    assert recipe_of(read_metadata(archived)) == RECIPE_VALUES
    plain = archived.with_suffix(".safetensors")
    atomic.write(plain, cachefile.serialize({}, STAMP))
    assert recipe_of(read_metadata(plain)) == RECIPE_VALUES
    for path in (archived, plain):
        path.write_bytes(b"neither")
        assert recipe_of(read_metadata(path)) == {}
        path.unlink()
        assert recipe_of(read_metadata(path)) == {}


LATENTS = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3)
CHANGED = "checksum differs"
KINDS = ("safetensors", "npz")


def written(
    kind: str, latents: torch.Tensor = LATENTS, stamp: dict[str, str] = STAMP, **more: torch.Tensor
) -> bytes:
    tensors = {"latents": latents, **more}
    if kind == "npz":
        return npz.serialize({name: each.numpy() for name, each in tensors.items()}, stamp)
    return cachefile.serialize(tensors, stamp | {"scaling_factor": "0.18"})


def found_in(data: bytes, kind: str = "safetensors") -> str | None:
    with file_of(data, f".{kind}") as path:
        return verify(path).damage


def with_tensor(kind: str, values: torch.Tensor, stamp: dict[str, str] = STAMP) -> bytes:
    """Return a file with other values than those of its checksum."""
    whole = written(kind, stamp=stamp)
    start = whole.index(LATENTS.numpy().tobytes())
    body = values.numpy().tobytes()
    return whole[:start] + body + whole[start + len(body) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.zeros(4, 2, 3), "is all zeros (latents)"),
        (torch.full((4, 2, 3), float("nan")), "holds NaN or infinity (latents)"),
        (LATENTS / (LATENTS - 5), "holds NaN or infinity (latents)"),
    ],
)
def test_values_that_no_encoder_makes_are_named(
    kind: str, values: torch.Tensor, reason: str
) -> None:
    assert found_in(written(kind, values), kind) == reason
    assert found_in(written(kind, values, OLD), kind) == reason
    assert found_in(with_tensor(kind, values), kind) == CHANGED


def test_other_values_are_found_by_the_checksum_alone() -> None:
    """An archive has sums of its own."""
    for kind in KINDS:
        assert found_in(with_tensor(kind, LATENTS + 1), kind) == CHANGED
    assert found_in(with_tensor("safetensors", LATENTS + 1, OLD)) is None
    assert found_in(with_tensor("npz", LATENTS + 1, OLD), "npz") == CHANGED  # ZIP has its own


FLOATS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
SPECIAL = (0.0, -0.0, 1e-39, -1e-7, 3.0, float("nan"), float("inf"), -float("inf"))  # two denormal


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", SPECIAL)
def test_values_are_judged_by_their_bits(dtype: torch.dtype, value: float) -> None:
    among = torch.randn(40, generator=torch.Generator().manual_seed(0))
    among[17] = value
    for values in (among.to(dtype), torch.full((3,), value).to(dtype)):
        expected = None
        if not values.isfinite().all():
            expected = "holds NaN or infinity (latents)"
        elif not values.view(FLOATS[dtype]).any():
            expected = "is all zeros (latents)"
        assert found_in(written("safetensors", values)) == expected


def test_what_is_zero_by_right_is_sound() -> None:
    zeros = {"attention_mask": torch.zeros(64, dtype=torch.int64), "alpha_mask": torch.zeros(64)}
    zeros["latents_clean_4x_16x8x8_float32"] = torch.zeros(64)  # before FramePack's first section
    for kind in KINDS:
        assert found_in(written(kind, stamp=OLD, **zeros), kind) is None
    for stamp in (OLD, STAMP):
        text = stamp | {cachefile.RECIPE: '{"kind":"text"}'}
        assert found_in(written("safetensors", torch.zeros(4, 2, 3), text)) is None
        assert found_in(written("safetensors", torch.zeros(4, 2, 3), stamp)) is not None
    assert found_in(with_tensor("safetensors", torch.zeros(4, 2, 3), text)) == "checksum differs"


def test_a_header_that_is_no_json_is_damaged() -> None:
    whole = written("safetensors")
    assert found_in(whole[:30] + b"\xff{" + whole[32:]) == "has a damaged header"
    (length,) = struct.unpack_from("<Q", whole)
    again = json.dumps(json.loads(whole[8 : 8 + length])).encode()
    again = struct.pack("<Q", len(again)) + again + whole[8 + length :]
    assert found_in(again) == "was rewritten by another program"
    assert found_in(whole + b"x") == "is cut short or has grown"


@pytest.mark.parametrize(
    "data",
    [
        cachefile.serialize(TENSORS, {"architecture": "wan"}),
        b"\x89PNG\r\n\x1a\n" + bytes(range(100)),
        b"some text, and more of it",
    ],
    ids=["safetensors", "png", "text"],
)
def test_a_file_of_another_program_is_not_ours(data: bytes) -> None:
    with file_of(data, ".npz") as path:
        assert verify(path) == Checked(FOREIGN)
    with file_of(data) as path:
        assert verify(path) == Checked(FOREIGN)
        refuse(path)


def test_a_compressed_archive_is_checked_by_what_it_holds() -> None:
    arrays = io.BytesIO()
    np.savez_compressed(arrays, latents=LATENTS.numpy())
    data = npz.stamped(arrays.getvalue(), STAMP)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    assert npz.comment_of(data, len(data)).count(checksum([_npy(LATENTS)]).encode()) == 1
    assert found_in(data, kind="npz") is None


def _npy(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, tensor.numpy())
    return buffer.getvalue()


@pytest.mark.parametrize("seed", range(200))
def test_each_reader_of_a_damaged_file_names_the_damage(seed: int) -> None:
    data = damaged(ARCHIVE, Random(seed))
    with file_of(data, ".npz") as path:
        for read in (npz.load, cachefile.shapes_in):
            with suppress(OSError, ValueError):
                read(path)
