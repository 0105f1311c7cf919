"""The pixels that the VAE sees, against a second, plain reading of how musubi-tuner makes them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from clip_world import MODEL, InProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import work_of
from latentmake.base.digest import source_stat
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.encode.pixels import plain as pixels
from latentmake.encode.pixels.scaling import cover
from latentmake.encode.pixels.stored import open_image
from latentmake.encode.reading import Reading, stored_size
from latentmake.encode.videos import _places, _samples
from latentmake.formats.media import probe_video
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, kept_indices
from latentmake.layouts.layout import layout_of
from latentmake.plan.orders import Order, Target
from numpy.typing import NDArray
from PIL import Image
from refusals import refused
from video_world import write_video

Pixels = NDArray[np.uint8]
LIMIT = 178_956_970
RESOLUTION = Size(64, 64)


def bucket_of(size: Size) -> Size:
    return layout_of("musubi").size(size, RESOLUTION, Dataset(path="data", fit="bucket"))


def scaled(picture: Pixels, width: int, height: int) -> Pixels:
    """Cover a size and cut its centre, channels as they are."""
    high, wide = picture.shape[0], picture.shape[1]
    if (wide, high) == (width, height):
        return picture
    factor = max(width / wide, height / high)
    wide, high = math.floor(wide * factor + 0.5), math.floor(high * factor + 0.5)
    if factor > 1:
        picture = np.array(Image.fromarray(picture).resize((wide, high), Image.LANCZOS))
    else:
        picture = cv2.resize(picture, (wide, high), interpolation=cv2.INTER_AREA)
    above, before = (high - height) // 2, (wide - width) // 2
    return picture[above : above + height, before : before + width]


def kept_pictures(path: Path, fps: float | None) -> list[Pixels]:
    """All frames of a file that are kept, decoded from the file itself."""
    with av.open(str(path)) as file:
        decoded = [np.array(frame.to_image()) for frame in file.decode(video=0)]
    return [decoded[index] for index, _ in kept_indices(len(decoded), fps)]


def noise(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Noise on a gradient, so that each way of scaling it gives another result."""
    width, height = size
    channels = len(Image.new(mode, (1, 1)).getbands())
    dice = np.random.default_rng(width * 1000 + height)
    values = dice.integers(0, 120, (height, width, channels))
    values += np.linspace(0, 135, width).astype(int)[None, :, None]
    values = values.astype(np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes, limit: int = LIMIT) -> Image.Image:
    return Image.fromarray(open_image(data, "a.png", limit))


def palette() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 10, 20, 250])
    image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "kind", "colour"),
    [
        (noise((9, 7)), "PNG", None),
        (noise((9, 7), "RGBA"), "PNG", None),
        (Image.new("L", (4, 4), 9), "PNG", (9, 9, 9)),
        (Image.new("1", (4, 4), 1), "PNG", (255, 255, 255)),
        (Image.new("LA", (4, 4), (7, 0)), "PNG", (7, 7, 7)),
        (palette(), "PNG", (10, 20, 250)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 200, np.uint16)), "PNG", (200, 200, 200)),
        (Image.fromarray(np.full((4, 4), 20_000, np.uint16)), "PNG", (255, 255, 255)),
    ],
    ids=["RGB", "RGBA", "L", "1", "LA", "P", "CMYK", "16 bits, dark", "16 bits"],
)
def test_colours_stay_as_they_are_and_all_else_becomes_rgb_as_pillow_does_it(
    image: Image.Image, kind: str, colour: tuple[int, int, int] | None
) -> None:
    data = encoded(image, kind)
    found, mode = opened(data), image.mode if colour is None else "RGB"
    assert found.mode == mode
    assert colour is None or found.getpixel((0, 0)) == colour
    plainly = Image.open(io.BytesIO(data)).convert(mode)
    assert np.array_equal(np.asarray(found), np.asarray(plainly))


def test_faults_are_named_as_in_other_images() -> None:
    data = encoded(noise((31, 23)))
    dataset = Dataset(path="data", max_image_pixels=LIMIT)
    for broken in (b"", b"hello", data[: len(data) // 2], data[: len(data) * 3 // 4]):
        line = refused(lambda x=broken: opened(x), "a.png", SourceError)
        assert line == refused(lambda x=broken: pixels.decode(x, "a.png", dataset))
    line = refused(lambda: opened(data, 712), "a.png", SourceError)
    assert "has 31 x 23 pixels, more than 712 in all" in line
    assert opened(data, 713).size == (31, 23)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([16, 64, 100]) | st.integers(1, 150),
    st.sampled_from([16, 64, 100]) | st.integers(1, 150),
    st.sampled_from([16, 64, 100]) | st.integers(16, 120),
    st.sampled_from([16, 64, 100]) | st.integers(16, 120),
    st.sampled_from(["RGB", "RGBA"]),
)
def test_pixels_of_any_size_are_those_of_the_rules(
    width: int, height: int, wide: int, high: int, mode: str
) -> None:
    image = noise((width, height), mode)
    expected = scaled(np.array(image), wide, high)[:, :, :3]
    for given_as in (image, np.array(image)):
        found = cover(given_as, Size(wide, high))
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        assert np.array_equal(found, expected)


def controls_of(video: Path, control: Path, fps: float | None, wanted: list[Clip]) -> list[Any]:
    """Make clips with their controls as a build does, but in this process; return the controls."""
    targets = tuple(Target("", f"{n}", None, RESOLUTION, clip) for n, clip in enumerate(wanted))
    work = work_of("a", str(video), None, targets, (str(control),), media=probe_video(str(video)))
    settings = Dataset(path="data", target_frames=[5], source_fps=fps, fit="bucket")
    order = Order("latents", "cats", "wan", settings, MODEL, {}, (work,))
    sources: dict[str, list[Any]] = {
        str(path): [*source_stat(path.stat())] for path in (video, control)
    }
    keys = {target: target.path for target in targets}
    size = stored_size(work.item)
    places = {target: order.layout.place(size, RESOLUTION, settings) for target in targets}
    reading = Reading(work, "digest", missing=keys, sources=sources, places=places)
    made = _samples(order, _places(order, [reading]), InProcess())
    found = {sample.key: sample.control for some in made for sample in some}
    return [found[target.path] for target in targets]


def control_of(path: Path, fps: float | None, target: Size, clip: Clip) -> Pixels:
    """Scale all frames to the bucket of their own, then to the other's; repeat the last one."""
    kept = kept_pictures(path, fps)
    own = bucket_of(Size(kept[0].shape[1], kept[0].shape[0]))
    twice = [scaled(scaled(picture, *own), *target) for picture in kept]
    twice += [twice[-1]] * (clip.start + clip.frames)
    return np.stack(twice[clip.start : clip.start + clip.frames])


@pytest.mark.parametrize("count", [1, 9, 30])
@pytest.mark.parametrize("size", [(64, 48), (48, 80), (160, 96)])
@pytest.mark.parametrize("fps", [None, 24.0])
def test_controls_are_those_of_the_rules(
    tmp_path: Path, count: int, size: tuple[int, int], fps: float | None
) -> None:
    path = write_video(tmp_path / "a.mp4", "libx264", count, size=size)
    shape = Size(96, 48)
    target = bucket_of(shape)
    cut = [Clip(0, 5), Clip(3, 5), Clip(7, 5)]
    video = write_video(tmp_path / "video.mp4", "mpeg4", 30, size=shape)
    for clip, found in zip(cut, controls_of(video, path, fps, cut), strict=True):
        assert np.array_equal(found, control_of(path, fps, target, clip))
