"""Any change of a cache file is found and named, and nothing is said of a sound one."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.files import cachefile, npz
from latentmake.files.cachefile import FOREIGN, Checked, verify
from latentmake.files.safetensors import PLACEHOLDERS, checksum

RECIPE: dict[str, object] = {"format": 1, "dtype": "float32"}
KEY = "k" * 64
STAMP = cachefile.stamp(key=KEY, source="s" * 64, recipe=RECIPE)
OLD = {name: STAMP[name] for name in STAMP.keys() - PLACEHOLDERS.keys()}
LATENTS = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3)
EMBEDDING = torch.arange(1, 9, dtype=torch.bfloat16).reshape(2, 4)
MORE = {"caption": 'a "café"', "scaling_factor": "0.18"}
FORMATS = ("safetensors", "npz")
CHANGED = "checksum differs"
NEXT_TO_NOTHING = torch.tensor([0.0])


def written(
    kind: str, latents: torch.Tensor = LATENTS, stamp: dict[str, str] = STAMP, **more: torch.Tensor
) -> bytes:
    tensors = {"latents": latents, **more}
    if kind == "npz":
        return npz.serialize({name: each.numpy() for name, each in tensors.items()}, stamp)
    return cachefile.serialize(tensors, stamp | MORE)


def found_in(data: bytes, kind: str = "safetensors") -> str | None:
    path = Path(f"/tmp/latentmake-verified-{os.getpid()}.{kind}")
    path.write_bytes(data)
    try:
        return verify(path).damage
    finally:
        path.unlink()


def with_tensor(kind: str, values: torch.Tensor, stamp: dict[str, str] = STAMP) -> bytes:
    """Return a file with other values than those of its checksum."""
    whole = written(kind, stamp=stamp)
    start = whole.index(LATENTS.numpy().tobytes())
    body = values.numpy().tobytes()
    return whole[:start] + body + whole[start + len(body) :]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stamp", [STAMP, OLD], ids=["checksum", "none"])
def test_a_sound_file_is_sound_under_any_name(
    tmp_path: Path, kind: str, stamp: dict[str, str]
) -> None:
    for name in (f"a.{kind}", "spooled"):
        path = tmp_path / name
        path.write_bytes(written(kind, stamp=stamp, more=NEXT_TO_NOTHING))
        checked = verify(path)
        assert (checked.damage, checked.has_checksum) == (None, stamp is STAMP)
        assert checked.header == cachefile.read_header(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_flipped_bit_is_found(kind: str) -> None:
    whole = written(kind)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        assert found_in(bytes(changed), kind) is not None, place


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_anywhere_is_damaged(kind: str) -> None:
    whole = written(kind)
    for length in range(len(whole)):
        assert found_in(whole[:length], kind) is not None, length
    for length in (0, len(whole) // 2, len(whole) - 1):
        assert str(found_in(whole[:length], kind)).startswith("is cut short"), length


@pytest.mark.parametrize("kind", FORMATS)
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
    for kind in FORMATS:
        assert found_in(with_tensor(kind, LATENTS + 1), kind) == CHANGED
    assert found_in(with_tensor("safetensors", LATENTS + 1, OLD)) is None
    assert found_in(with_tensor("npz", LATENTS + 1, OLD), "npz") == CHANGED  # ZIP has its own


SPECIAL = (0.0, -0.0, 1e-39, -1e-7, 3.0, float("nan"), float("inf"), -float("inf"))  # two denormal
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@settings(deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from([*BITS, torch.int64]),
    length=st.integers(1, 40) | st.sampled_from([(1 << 18) - 100, (1 << 18) + 3]),
    first=st.sampled_from([*SPECIAL, None]),
    others=st.lists(st.tuples(st.integers(0, 1 << 18), st.sampled_from(SPECIAL)), max_size=2),
    by_checksum=st.booleans(),
)
def test_values_are_judged_by_their_bits(
    dtype: torch.dtype,
    length: int,
    first: float | None,
    others: list[tuple[int, float]],
    by_checksum: bool,
) -> None:
    dice = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=dice) if first is None else torch.full((length,), first)
    for place, value in others:
        values[place % length] = value
    values = values.nan_to_num(0, 7, -7).long() if dtype is torch.int64 else values.to(dtype)
    bits = values.view(BITS.get(dtype, dtype))
    expected = None
    if dtype in BITS and not values.isfinite().all():
        expected = "holds NaN or infinity (latents)"
    elif dtype in BITS and not bits.any():
        expected = "is all zeros (latents)"
    stamp = STAMP if by_checksum else OLD
    assert found_in(written("safetensors", values, stamp)) == expected


def test_what_is_zero_by_right_is_sound() -> None:
    masks = {"attention_mask": torch.zeros(64, dtype=torch.int64), "alpha_mask": torch.zeros(64)}
    for kind in FORMATS:
        assert found_in(written(kind, stamp=OLD, **masks), kind) is None
    for stamp in (OLD, STAMP):
        text = stamp | {cachefile.RECIPE: '{"kind":"text"}'}
        assert found_in(written("safetensors", torch.zeros(4, 2, 3), text)) is None
        assert found_in(written("safetensors", torch.zeros(4, 2, 3), stamp)) is not None
    assert found_in(with_tensor("safetensors", torch.zeros(4, 2, 3), text)) == "checksum differs"


@pytest.mark.parametrize("kind", FORMATS)
def test_an_edited_header_is_damaged(kind: str) -> None:
    whole = written(kind)
    for old, new in ((b"k" * 64, b"o" * 64), (b"s" * 64, b"o" * 64), (b"float32", b"float16")):
        assert whole.count(old) == 1
        assert found_in(whole.replace(old, new), kind) == "has a damaged header"


def test_a_header_that_is_no_json_is_damaged() -> None:
    whole = written("safetensors")
    for place in (8, 9, 30):
        changed = whole[:place] + b"\xff{" + whole[place + 2 :]
        assert found_in(changed) == "has a damaged header"
    (length,) = struct.unpack_from("<Q", whole)
    assert found_in(struct.pack("<Q", length + 1000) + whole[8:]) is not None
    again = json.dumps(json.loads(whole[8 : 8 + length])).encode()
    again = struct.pack("<Q", len(again)) + again + whole[8 + length :]
    assert found_in(again) == "was rewritten by another program"
    assert found_in(whole + b"x") == "is cut short or has grown"


def test_a_file_of_another_program_is_not_ours(tmp_path: Path) -> None:
    archive = io.BytesIO()
    np.savez(archive, latents=LATENTS.numpy())
    for number, data in enumerate(
        (
            cachefile.serialize({"latents": LATENTS}, {"architecture": "wan"}),
            archive.getvalue(),
            b"\x89PNG\r\n\x1a\n" + bytes(range(100)),
            b"some text, and more of it",
        )
    ):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(data)
        assert verify(path) == Checked(FOREIGN)


def test_a_file_of_zeros_from_end_to_end_may_have_been_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(500))
    assert verify(path) == Checked("has a damaged header")


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
