"""Views of latents say what is done to a picture: they differ where pixels do, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.encode.pixels import plain, scaling
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip
from latentmake.layouts.layout import Layout, kind_of, layout_of, resolution_of

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


def fitted(layout: Layout, image: np.ndarray, resolution: Size, settings: Dataset) -> np.ndarray:
    placement = layout.place(Size(image.shape[1], image.shape[0]), resolution, settings)
    if layout.encoding == "wan":
        return scaling.cover(image, placement.target)
    return (plain if layout.encoding == "plain" else scaling).fit(image, placement)


@pytest.mark.parametrize("name", ["plain", "sdscripts-sdxl", "musubi"])
@given(SIZES, RESOLUTIONS, RESOLUTIONS, SETTINGS, SETTINGS)
def test_two_settings_give_a_picture_one_view_where_they_give_it_the_same_pixels(
    name: str,
    size: Size,
    resolution: Size,
    other_resolution: Size,
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    layout = layout_of(name)
    asked = [(resolution, dataset(**one)), (other_resolution, dataset(**other))]
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (size.height, size.width, 3), np.uint8)
    try:
        views = [layout.view(size, *each)[0] for each in asked]
    except SourceError:
        return  # it is refused, whatever the view
    made = [fitted(layout, image, *each) for each in asked]
    assert (views[0] == views[1]) == np.array_equal(*made)


@pytest.mark.parametrize("layout", ["plain", "sdscripts-sdxl", "musubi"])
def test_a_square_picture_has_one_view_for_crop_and_bucket(layout: str) -> None:
    values = dataset(fit="bucket", bucket_reso_steps=16, min_bucket_reso=16)
    views = {
        layout_of(layout).view(Size(100, 100), Size(64, 64), each)[0]
        for each in (dataset(fit="crop"), values)
    }
    assert len(views) == 1


def test_a_clip_has_a_view_of_its_frames_and_of_its_size() -> None:
    videos = dataset(target_frames=[1, 5])

    def view(clip: Clip, values: Dataset = videos, **more: Any) -> str:
        return layout_of("musubi").view(Size(160, 80), Size(64, 64), values, clip=clip, **more)[0]

    assert view(Clip(0, 5)) == "80x48:0-5"
    assert len({view(Clip(0, 5)), view(Clip(1, 5)), view(Clip(0, 1))}) == 3
    # Of a controlled one its control is first brought to a bucket of the resolution.
    controlled = dataset(target_frames=[5], control_directory="control")
    assert view(Clip(0, 5), controlled, rotation=90) == "80x48:0-5@64x64:r90"


def test_a_view_has_the_sizes_of_controls_where_they_are_of_their_own() -> None:
    layout, values = layout_of("musubi-qwen_image"), dataset(no_resize_control=True)

    def view(*controls: Size, is_text: bool = False) -> str:
        sizes = Size(80, 64), Size(64, 64)
        return layout.view(*sizes, values, controls=controls, is_text=is_text)[0]

    assert view() == view(Size(64, 79)) == "64x64"
    assert view(Size(100, 71), Size(100, 71)) == "64x64+96x64+96x64"
    assert view(Size(100, 71), Size(100, 71), is_text=True) == "controls:96x64"
    assert view(Size(100, 71), Size(64, 64), is_text=True) == "controls:96x64+64x64"
    assert view(is_text=True) == "controls:64x64"


@pytest.mark.parametrize(
    ("name", "kind", "resolution"),
    [
        ("64", "latents", (64, 64)),
        ("512x768", "latents", (512, 768)),
        ("text", "text", None),
        ("text.1@512x768", "text", (512, 768)),
        ("a folder of others", "latents", None),
    ],
)
def test_the_name_of_a_part_says_what_it_holds(
    name: str, kind: str, resolution: tuple[int, int] | None
) -> None:
    assert (kind_of(name), resolution_of(name)) == (kind, resolution)
