"""Control images get the sizes that musubi-tuner brings them to."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size, control_size, has_own_sizes, nearest_size, refuse_odd


def dataset(**changes: Any) -> Dataset:
    return Dataset.model_validate({"path": "data", **changes})


@pytest.mark.parametrize(
    ("image", "step", "expected"),
    [
        (Size(1024, 1024), 16, Size(1024, 1024)),
        (Size(1920, 1080), 16, Size(1360, 768)),
        (Size(300, 700), 16, Size(672, 1552)),
        (Size(500, 400), 32, Size(1152, 896)),
    ],
)
def test_the_nearest_size_keeps_shape_and_area(image: Size, step: int, expected: Size) -> None:
    assert nearest_size(image, Size(1024, 1024), step) == expected


@pytest.mark.parametrize(
    ("settings", "control", "expected"),
    [
        ({"no_resize_control": True}, Size(100, 71), Size(96, 64)),
        ({"control_resolution": 128}, Size(64, 64), Size(128, 128)),
        # An image below the most is not even rounded.
        ({"control_resolution": 128, "no_resize_control": True}, Size(100, 71), Size(100, 71)),
        (
            {"control_resolution": [128, 64], "no_resize_control": True},
            Size(200, 200),
            Size(80, 96),
        ),
    ],
)
def test_a_control_image_keeps_its_size_or_gets_one_of_its_shape(
    settings: dict[str, Any], control: Size, expected: Size
) -> None:
    section = dataset(**settings)
    assert has_own_sizes(section)
    assert control_size(control, section, 16) == expected


def test_by_default_a_control_image_has_no_size_of_its_own() -> None:
    assert not has_own_sizes(dataset())


@pytest.mark.parametrize(
    ("settings", "control"),
    [
        ({"no_resize_control": True}, Size(15, 400)),
        ({"control_resolution": 64}, Size(64, 200)),  # of which musubi-tuner divides by zero
    ],
)
def test_a_control_image_of_which_nothing_is_left_is_refused(
    settings: dict[str, Any], control: Size
) -> None:
    with pytest.raises(SourceError, match="is too narrow for a control image"):
        control_size(control, dataset(**settings), 16)


def test_a_control_image_that_keeps_a_size_without_whole_patches_is_refused() -> None:
    refuse_odd(Size(96, 64), 16, vae=True)
    refuse_odd(Size(103, 71), 16, vae=True)  # of which a VAE leaves out the rest
    refuse_odd(Size(96, 64), 32, vae=False)
    for size, step, vae in (
        (Size(104, 64), 16, True),
        (Size(64, 111), 16, True),
        (Size(97, 64), 32, False),
    ):
        with pytest.raises(SourceError, match=f"keeps its size of {size.width} x {size.height}"):
            refuse_odd(size, step, vae=vae)
