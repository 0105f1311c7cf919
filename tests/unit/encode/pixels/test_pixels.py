"""Any image comes out upright, opaque and of the size asked for; any other file as one line."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.pixels import plain, stored
from latentmake.encode.pixels.plain import decode
from latentmake.formats.media import upright_size
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of
from numpy.typing import NDArray
from PIL import Image
from refusals import refused

SETTINGS = Dataset(path="data")
ORIENTATION = 0x0112
# How a picture must be stored, so that a viewer who follows the orientation sees it upright.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, **changes: Any) -> Image.Image:
    image = decode(data, "a.png", SETTINGS.model_copy(update=changes))
    assert image.mode == "RGB"
    return image


def refusal(data: bytes, **changes: Any) -> str:
    return refused(lambda: decoded(data, **changes), "a.png", SourceError)


@pytest.fixture
def scene() -> Image.Image:
    """A picture without symmetry, of unequal sides."""
    values = np.zeros((20, 30, 3), np.uint8)
    values[:5, :10] = (255, 0, 0)
    values[15:, :10] = (0, 255, 0)
    values[:5, 25:] = (0, 0, 255)
    return Image.fromarray(values)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_every_orientation_gives_the_upright_picture(
    scene: Image.Image, orientation: int, kind: str
) -> None:
    method = STORED[orientation]
    stored = scene if method is None else scene.transpose(method)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(stored, kind, exif=exif, **options)
    assert np.array_equal(np.asarray(decoded(data)), np.asarray(scene))
    for turned in (True, False):
        told = upright_size(data, "a.png", SETTINGS.max_image_pixels, turns=turned)
        assert told == decoded(data, exif_rotation=turned).size
    if kind != "TIFF":  # Pillow turns a TIFF by itself
        unturned = decoded(data, exif_rotation=False)
        assert np.array_equal(np.asarray(unturned), np.asarray(stored))


def one_pixel(image: Image.Image, **changes: Any) -> tuple[int, ...]:
    pixel = decoded(encoded(image), **changes).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def palette(transparent: bool) -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    if transparent:
        image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "on_white", "on_colour"),
    [
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), (255, 255, 255), (16, 32, 48)),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 255)), (255, 0, 0), (255, 0, 0)),
        (Image.new("LA", (4, 4), (0, 0)), (255, 255, 255), (16, 32, 48)),
        (Image.new("LA", (4, 4), (7, 255)), (7, 7, 7), (7, 7, 7)),
        (palette(transparent=True), (255, 255, 255), (16, 32, 48)),
        (palette(transparent=False), (0, 0, 255), (0, 0, 255)),
        (Image.new("L", (4, 4), 9), (9, 9, 9), (9, 9, 9)),
        (Image.new("1", (4, 4), 1), (255, 255, 255), (255, 255, 255)),
    ],
    ids=["RGBA", "opaque RGBA", "LA", "opaque LA", "P", "opaque P", "L", "1"],
)
def test_transparency_shows_the_background_and_opaque_pixels_do_not(
    image: Image.Image, on_white: tuple[int, ...], on_colour: tuple[int, ...]
) -> None:
    assert one_pixel(image) == on_white
    assert one_pixel(image, background="#102030") == on_colour


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (1, 2, 3)), ("L", 5)])
def test_a_colour_marked_as_transparent_shows_the_background(mode: str, colour: Any) -> None:
    data = encoded(Image.new(mode, (4, 4), colour), transparency=colour)
    assert decoded(data).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(decoded(encoded(Image.fromarray(values), kind)))
        assert pixels[0, :, 0].tolist() == [0, 1, 128, 255]
        assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decoded(data).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("layout", ["plain", "wan", "sdscripts"])
def test_fractions_of_white_are_refused_and_not_encoded_as_black(layout: str) -> None:
    def opened(most: float) -> NDArray[np.uint8]:
        values = np.linspace(0, most, 64, dtype=np.float32).reshape(8, 8)
        data = encoded(Image.fromarray(values), "TIFF")
        if layout != "plain":
            alpha = None if layout == "wan" else False
            return stored.open_image(data, "a.tif", 10**6, alpha=alpha)
        return np.asarray(decode(data, "a.tif", SETTINGS))

    with pytest.raises(SourceError) as caught:
        opened(1)
    assert str(caught.value) == (
        "a.tif: holds floating-point values from 0 to 1, which would become black; "
        "save it with 8 or 16 bits a channel"
    )
    assert opened(255).max() == 255


def test_a_bomb_is_refused_before_it_is_decoded(scene: Image.Image) -> None:
    line = refusal(encoded(scene), max_image_pixels=599)
    assert "has 30 x 20 pixels, more than 599 in all (a decompression bomb?); scale it" in line
    assert decoded(encoded(scene), max_image_pixels=600).size == (30, 20)


def noise(mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)
    return Image.fromarray(values).convert(mode)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF"])
def test_a_file_cut_short_is_named(kind: str) -> None:
    if kind == "AVIF" and ".avif" not in Image.registered_extensions():
        pytest.skip("this Pillow cannot write AVIF")
    data = encoded(noise(), kind)
    for length in (len(data) // 2, len(data) * 3 // 4):
        line = refusal(data[:length])
        assert "is damaged or cut short" in line or "is not an image" in line


WHOLE = {
    kind: encoded(noise(), kind)
    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF")
    if kind in Image.SAVE or kind != "AVIF"
}
_EXIF = Image.Exif()
_EXIF[ORIENTATION] = 6
_EXIF[0x010E] = "a description"
WHOLE["JPEG with EXIF"] = encoded(noise(), "JPEG", exif=_EXIF)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 2**32))
def test_no_damage_is_more_than_one_bad_file(kind: str, seed: int) -> None:
    data = bytearray(WHOLE[kind])
    dice = random.Random(seed)
    for _ in range(dice.choice([1, 2, 8])):
        within = len(data) if dice.random() < 0.5 else min(len(data), 200)
        data[dice.randrange(within)] = dice.randrange(256)
    try:
        decoded(bytes(data))
    except SourceError as error:
        assert "\n" not in str(error)


def fit(
    image: Image.Image, resolution: tuple[int, int], settings: Dataset, path: str = ""
) -> NDArray[np.uint8]:
    size = Size(*image.size)
    placed = layout_of("plain").place(size, Size(*resolution), settings, path)
    return plain.fit(np.array(image), placed)


@settings(deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([(64, 64), (32, 48), (48, 32)]),
    st.sampled_from(["crop", "bucket"]),
    st.booleans(),
)
def test_the_pixels_have_the_size_that_the_arithmetic_says(
    width: int, height: int, resolution: tuple[int, int], how: str, keep: bool
) -> None:
    image = Image.new("RGB", (width, height), (10, 20, 30))
    settings = Dataset(path="data", fit=how, bucket_no_upscale=keep)
    found = fit(image, resolution, settings)
    expected = layout_of("plain").size(Size(width, height), Size(*resolution), settings)
    assert found.shape == (expected.height, expected.width, 3)
    assert found.dtype == np.uint8
    assert (found == (10, 20, 30)).all()


def test_the_centre_is_kept(scene: Image.Image) -> None:
    found = fit(scene, (20, 20), SETTINGS)
    assert np.array_equal(found, np.asarray(scene)[:, 5:25])


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    assert np.array_equal(fit(noise(), (31, 23), SETTINGS), np.asarray(noise()))


def test_a_picture_is_measured_by_the_bucket_that_its_cache_is_named_after() -> None:
    model = Model(layout="musubi", architecture="hidream_o1", task="t2i")
    layout, settings = layout_of(model.layout_name), Dataset(path="data", fit="bucket")
    assert layout.size(Size(100, 220), Size(256, 256), settings) == (160, 384)
