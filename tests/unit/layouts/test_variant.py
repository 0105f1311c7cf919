"""Keys of latents say what is done to a picture: they differ where pixels do, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake import layouts
from latentmake.caches.pixels import plain as pixels
from latentmake.caches.pixels import scaling
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size, wan_size
from latentmake.geometry.clips import Clip
from latentmake.geometry.sdscripts_buckets import placement

SIDES = st.integers(24, 160)
SIZES = st.builds(Size, SIDES, SIDES)
SETTINGS = st.fixed_dictionaries(
    {"fit": st.sampled_from(["crop", "bucket"])},
    optional={
        "bucket_reso_steps": st.sampled_from([8, 16, 32]),
        "bucket_no_upscale": st.booleans(),
    },
)
RESOLUTIONS = st.sampled_from([Size(64, 64), Size(64, 96), Size(128, 128)])


def dataset(**values: Any) -> Dataset:
    return Dataset.model_validate({"path": "data", **values})


def noise(size: Size) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (size.height, size.width, 3), np.uint8)


def plain(image: np.ndarray, resolution: Size, settings: Dataset) -> np.ndarray:
    return pixels.fit(image, resolution, settings)


def sdscripts(image: np.ndarray, resolution: Size, settings: Dataset) -> np.ndarray:
    size = Size(image.shape[1], image.shape[0])
    return scaling.fit(image, placement(size, resolution, settings, "sdxl"))


def musubi(image: np.ndarray, resolution: Size, settings: Dataset) -> np.ndarray:
    size = Size(image.shape[1], image.shape[0])
    bucket, no_upscale = settings.fit == "bucket", settings.bucket_no_upscale
    return scaling.cover(image, wan_size(size, resolution, bucket=bucket, no_upscale=no_upscale))


@pytest.mark.parametrize(
    ("layout", "fitted"),
    [("plain", plain), ("sdscripts-sdxl", sdscripts), ("musubi", musubi)],
)
@given(SIZES, RESOLUTIONS, RESOLUTIONS, SETTINGS, SETTINGS)
def test_two_settings_give_a_picture_one_key_where_they_give_it_the_same_pixels(
    layout: str,
    fitted: Any,
    size: Size,
    resolution: Size,
    other_resolution: Size,
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    asked = [(resolution, dataset(**one)), (other_resolution, dataset(**other))]
    image = noise(size)
    try:
        names = [layouts.of(layout).variant(wh, size, values, None) for wh, values in asked]
    except SourceError:
        return  # it is refused, whatever the key
    made = [fitted(image, wh, values) for wh, values in asked]
    assert (names[0] == names[1]) == np.array_equal(*made)


@pytest.mark.parametrize("layout", ["plain", "sdscripts-sdxl", "musubi"])
def test_a_square_picture_has_one_key_for_crop_and_bucket(layout: str) -> None:
    values = dataset(fit="bucket", bucket_reso_steps=16, min_bucket_reso=16)
    names = {
        layouts.of(layout).variant(Size(64, 64), Size(100, 100), each, None)
        for each in (dataset(fit="crop"), values)
    }
    assert len(names) == 1


def test_a_clip_has_a_key_of_its_frames_and_of_its_size() -> None:
    videos = dataset(target_frames=[1, 5])
    musubi_layout = layouts.of("musubi")

    def name(clip: Clip, values: Dataset = videos) -> str:
        return musubi_layout.variant(Size(64, 64), Size(160, 80), values, clip)

    assert name(Clip(0, 5)) == "80x48:0-5"
    assert len({name(Clip(0, 5)), name(Clip(1, 5)), name(Clip(0, 1))}) == 3
    # Of a controlled one its control is first brought to a bucket of the resolution.
    controlled = dataset(target_frames=[5], control_directory="control")
    assert name(Clip(0, 5), controlled) == "80x48:0-5@64x64"


@pytest.mark.parametrize("layout", ["plain", "sdscripts-sdxl", "musubi"])
def test_text_has_no_variant(layout: str) -> None:
    assert layouts.of(layout).variant(None, Size(0, 0), dataset(), None) == ""
