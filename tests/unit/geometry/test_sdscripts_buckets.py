"""Sizes follow the rules of sd-scripts, read a second time: with numpy, and word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.datasets import Bucketing, Dataset
from latentmake.geometry.buckets import Size
from latentmake.geometry.sdscripts_buckets import bucket_sizes, crop_ltrb, place

sides = st.integers(1, 5000)
images = st.builds(Size, sides, sides)
steps = st.sampled_from([32, 64, 128])


@st.composite
def asked(draw: st.DrawFn, *, no_upscale: bool = False) -> tuple[Size, Bucketing]:
    """A resolution and buckets that sd-scripts takes."""
    step = draw(steps)
    least = step * draw(st.integers(1, 4))
    resolution = Size(draw(st.integers(max(least, step), 2048)), draw(st.integers(least, 2048)))
    most = step * draw(st.integers(math.ceil(max(resolution) / step), 80))
    return resolution, Bucketing(step, no_upscale, least, most)


def listed(resolution: Size, buckets: Bucketing) -> list[tuple[int, int]]:
    """The list of buckets as sd-scripts writes it down."""
    area = resolution.width * resolution.height
    found = {(int(math.sqrt(area) // buckets[0]) * buckets[0],) * 2}
    width = buckets.min_bucket_reso
    while width <= buckets.max_bucket_reso:
        height = min(buckets.max_bucket_reso, int((area // width) // buckets[0]) * buckets[0])
        if height >= buckets.min_bucket_reso:
            found |= {(width, height), (height, width)}
        width += buckets[0]
    return sorted(found)


@settings(deadline=None)
@given(asked())
def test_buckets_are_those_of_the_rules(question: tuple[Size, Bucketing]) -> None:
    assert list(bucket_sizes(*question)) == listed(*question)


@settings(deadline=None)
@given(images, asked())
def test_an_image_gets_the_bucket_of_the_nearest_aspect_or_its_own(
    image: Size, question: tuple[Size, Bucketing]
) -> None:
    resolution, buckets = question
    found = place(image, *question)
    sizes = listed(resolution, buckets)
    if tuple(image) in sizes:
        assert found.target == found.resized == image
        return
    errors = np.array([width / height for width, height in sizes]) - image.width / image.height
    assert tuple(found.target) == sizes[np.abs(errors).argmin()]


def check_covers(image: Size, found: tuple[Size, int, int, Size]) -> None:
    resized, left, top, target = found
    assert resized.width >= target.width and resized.height >= target.height
    assert resized.width == target.width or resized.height == target.height
    assert (left, top) == (
        (resized.width - target.width) // 2,
        (resized.height - target.height) // 2,
    )
    wide = image.width / image.height > target.width / target.height
    scale = target.height / image.height if wide else target.width / image.width
    assert resized == (int(image.width * scale + 0.5), int(image.height * scale + 0.5))


@settings(deadline=None)
@given(images, asked())
def test_a_bucket_is_covered_and_its_centre_kept(
    image: Size, question: tuple[Size, Bucketing]
) -> None:
    check_covers(image, place(image, *question))


@settings(deadline=None)
@given(images, st.builds(Size, st.integers(8, 2000), st.integers(8, 2000)))
def test_without_buckets_the_resolution_itself_is_covered(image: Size, resolution: Size) -> None:
    found = place(image, resolution, None)
    assert found.target == resolution
    check_covers(image, found)


@settings(deadline=None)
@given(images, asked(no_upscale=True))
def test_without_upscaling_nothing_grows_and_sides_are_multiples_of_the_steps(
    image: Size, question: tuple[Size, Bucketing]
) -> None:
    resolution, (step, *_) = question
    area, aspect = resolution.width * resolution.height, image.width / image.height
    try:
        resized, left, top, target = place(image, *question)
    except ValueError:
        return
    assert target.width % step == target.height % step == 0
    assert (left, top) == (
        (resized.width - target.width) // 2,
        (resized.height - target.height) // 2,
    )
    if image.width * image.height <= area:
        assert resized == image
        return
    down = lambda side: int(side + 0.5) - int(side + 0.5) % step  # noqa: E731
    width = down(math.sqrt(area * aspect))
    height = down(area / math.sqrt(area * aspect))
    by_width = (width, int(width / aspect + 0.5))
    by_height = (int(height * aspect + 0.5), height)
    nearer = abs(width / down(width / aspect) - aspect) < abs(
        down(height * aspect) / height - aspect
    )
    assert tuple(resized) == (by_width if nearer else by_height)


@settings(deadline=None)
@given(st.integers(1, 63), sides)
def test_an_image_smaller_than_a_step_is_refused_where_nothing_grows(
    narrow: int, long: int
) -> None:
    assume(narrow * long <= 512 * 512)
    with pytest.raises(ValueError, match="smaller than a step of 64"):
        place(Size(narrow, long), Size(512, 512), Bucketing(64, True, 256, 1024))


@settings(deadline=None)
@given(images, asked())
def test_what_it_calls_the_crop_is_the_image_fitted_inside_its_bucket(
    image: Size, question: tuple[Size, Bucketing]
) -> None:
    target = place(image, *question).target
    left, top, right, bottom = crop_ltrb(target, image)
    assert 0 <= left <= right <= target.width + 1e-6 and 0 <= top <= bottom <= target.height + 1e-6
    assert math.isclose((right - left) * image.height, (bottom - top) * image.width, rel_tol=1e-9)
    assert left == left // 1 and top == top // 1


def test_the_crop_of_a_known_image() -> None:
    assert crop_ltrb(Size(256, 256), Size(600, 400)) == (0, 42, 256, 42 + 256 / 1.5)


def test_steps_and_limits_are_those_of_the_architecture_rounded_to_the_steps() -> None:
    plain = Dataset(path="x", fit="bucket")
    assert plain.bucketing(ARCHITECTURES["sd1"]) == Bucketing(64, False, 256, 1024)
    assert plain.bucketing(ARCHITECTURES["sdxl"]).bucket_reso_steps == 32
    odd = Dataset(path="x", fit="bucket", min_bucket_reso=300, max_bucket_reso=1000)
    assert odd.bucketing(ARCHITECTURES["flux"]) == Bucketing(64, False, 256, 1024)
