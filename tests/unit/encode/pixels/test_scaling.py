"""Pixels of the plain layout are near those of Lanczos over the picture, decoded in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import inputs_of
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.pixels import plain, scaling
from latentmake.encode.pixels.plain import by_pillow, lanczos
from latentmake.encode.reading import Reading, Sample
from latentmake.formats.media import upright_size
from latentmake.geometry.buckets import Size, cover
from latentmake.layouts.layout import layout_of
from latentmake.plan.orders import Order, Target, Work
from picture_world import HARD, PHOTOGRAPHS, Pixels, Shape, encoded, noise, psnr
from PIL import ExifTags, Image

LEAST = 45.0  # dB
LEVELS = 2  # of 255
MODEL = Model(vae="vae", text=["text_encoder"])  # type: ignore[arg-type, list-item]
SHRUNK = {8: Size(16, 16), 4: Size(32, 16), 2: Size(72, 56)}  # of 1,024 x 768
SIZES = [Size(64, 64), Size(96, 96), Size(160, 128), Size(512, 512), Size(700, 700)]


def full_lanczos(data: bytes, size: Size, **changes: Any) -> Pixels:
    """Return the same by Pillow alone."""
    dataset = Dataset(path="data", **changes)
    image = plain.decode(data, "a.jpg", dataset)
    resized, left, top, target = layout_of("plain").place(Size(*image.size), size, dataset)
    pixels = by_pillow(np.asarray(image), resized)
    return pixels[top : top + target.height, left : left + target.width]


def samples(data: bytes, sizes: Iterable[Size], **changes: Any) -> list[Sample]:
    """Return the samples of some resolutions of one file, made in one job."""
    targets = [Target(f"{size}", f"{size}.safetensors", None, size) for size in sizes]
    item = inputs_of("a", "a.jpg")
    dataset = Dataset(path="data", **changes)
    order = Order("latents", "data", "tiny", dataset, MODEL, {}, (Work(item, tuple(targets)),))
    missing = {target: str(number) for number, target in enumerate(targets)}
    size = upright_size(data, "a.jpg", dataset.max_image_pixels, turns=dataset.exif_rotation)
    places = {target: order.layout.place(size, target.size, dataset) for target in targets}
    reading = Reading(order.items[0], "digest", data, size=size, missing=missing, places=places)
    return [*plain.samples_of(order, reading)]


def made(data: bytes, sizes: Iterable[Size], **changes: Any) -> list[Pixels]:
    """Return their pixels."""
    return [np.asarray(sample.content) for sample in samples(data, sizes, **changes)]


def compare(data: bytes, sizes: Iterable[Size] = SIZES, **changes: Any) -> None:
    for size, found in zip(sizes, made(data, sizes, **changes), strict=True):
        wanted = full_lanczos(data, size, **changes)
        assert found.shape == wanted.shape
        assert found.flags.c_contiguous
        assert np.abs(found.astype(int) - wanted).max() <= LEVELS
        assert psnr(found, wanted) > LEAST


@pytest.mark.parametrize("subsampling", [0, 2], ids=["4:4:4", "4:2:0"])
@pytest.mark.parametrize("draw", [*PHOTOGRAPHS.values(), *HARD.values()], ids=[*PHOTOGRAPHS, *HARD])
def test_any_picture_is_near_full_lanczos(
    draw: Callable[[Shape], Pixels], subsampling: int
) -> None:
    compare(encoded(draw((480, 600)), quality=95, subsampling=subsampling))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_any_size_is_near_full_lanczos(width: int, height: int, across: int, down: int) -> None:
    pixels, size = (
        noise((height, width)),
        cover(Size(width, height), Size(across, down), scaling.MAX_PIXELS).resized,
    )
    if size.width * size.height > 500_000:
        return
    wanted = by_pillow(pixels, size)
    assert np.abs(lanczos(pixels, size).astype(int) - wanted).max() <= LEVELS


@pytest.fixture
def shrinks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fractions that images are decoded to."""
    found: list[int] = []
    decode = plain.decode

    def noted(*given: Any, shrink: int = 0) -> Image.Image:
        found.append(shrink)
        return decode(*given, shrink=max(1, shrink))

    monkeypatch.setattr(plain, "decode", noted)
    return found


def nearness(data: bytes, sizes: Iterable[Size], **changes: Any) -> float:
    """Return the lowest PSNR of some resolutions against decoding in full."""
    found = [
        (made(data, [size], **changes)[0], full_lanczos(data, size, **changes)) for size in sizes
    ]
    assert all(one.shape == other.shape for one, other in found)
    return min(psnr(one, other) for one, other in found)


@pytest.mark.parametrize("subsampling", [0, 2], ids=["4:4:4", "4:2:0"])
@pytest.mark.parametrize("name", [*PHOTOGRAPHS, *HARD])
def test_a_jpeg_decoded_to_a_fraction_is_near_full_lanczos(
    name: str, subsampling: int, shrinks: list[int]
) -> None:
    data = encoded((PHOTOGRAPHS | HARD)[name]((768, 1024)), quality=95, subsampling=subsampling)
    found = nearness(data, SHRUNK.values())
    assert [each for each in shrinks if each > 1] == [8, 4, 2]
    # Where colours of half the resolution have edges between pure red, green and blue, each way of
    # decoding cuts off other values.
    assert found > (40 if name.startswith("primaries") and subsampling else LEAST)
    assert found > (50 if name in PHOTOGRAPHS else 0)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
@pytest.mark.parametrize(("turn", "shape"), [(1, (768, 1024)), (6, (1024, 768)), (8, (1016, 760))])
def test_turned_jpegs_and_those_of_other_modes_are_decoded_to_a_fraction(
    mode: str, turn: int, shape: Shape, shrinks: list[int]
) -> None:
    image = Image.fromarray(PHOTOGRAPHS["leaves"](shape)).convert(mode)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    for options in ({}, {"progressive": True}):
        data = encoded(image, quality=95, exif=exif, **options)
        for sample in samples(data, SHRUNK.values(), fit="bucket"):
            assert sample.original == (shape if turn > 1 else shape[::-1])
        assert nearness(data, SHRUNK.values(), fit="bucket") > LEAST
    assert max(shrinks) > 2


@pytest.mark.parametrize(
    ("shape", "shrink"), [((767, 1024), 1), ((766, 1024), 2), ((764, 1020), 4)]
)
def test_no_fraction_has_half_a_pixel(shape: Shape, shrink: int, shrinks: list[int]) -> None:
    data = encoded(PHOTOGRAPHS["leaves"](shape), quality=95)
    assert nearness(data, [Size(16, 16)]) > LEAST
    assert max(shrinks) == shrink


def test_other_files_are_decoded_in_full(shrinks: list[int]) -> None:
    image = Image.fromarray(PHOTOGRAPHS["clouds"]((768, 1024)))
    for kind in ("PNG", "WEBP", "BMP"):
        compare(encoded(image, kind), SHRUNK.values())
    assert max(shrinks) == 1
    assert nearness(encoded(image, "MPO", quality=95), SHRUNK.values()) > LEAST


def test_each_fraction_is_decoded_once_and_depends_on_no_other(shrinks: list[int]) -> None:
    data = encoded(PHOTOGRAPHS["leaves"]((768, 1024)))
    sizes = [*SHRUNK.values(), Size(60, 72), Size(32, 24), Size(512, 512), Size(384, 384)]
    together = made(data, sizes)
    assert sorted(shrinks) == [1, 2, 4, 8]
    for size, found in zip(sizes, together, strict=True):
        assert np.array_equal(*made(data, [size]), found)


def test_a_jpeg_that_is_cut_short_is_named_at_each_fraction() -> None:
    data = encoded(PHOTOGRAPHS["leaves"]((768, 1024)))
    for size in (*SHRUNK.values(), Size(512, 512)):
        with pytest.raises(SourceError, match=r"a\.jpg: is damaged or cut short"):
            made(data[: len(data) // 2], [size])
