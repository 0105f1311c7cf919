"""Sizes follow the rules of musubi-tuner's image datasets, transcribed here a second time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from latentmake.geometry.buckets import Size, bucket_sizes, place, target_size, wan_size

sides = st.integers(1, 6000)
steps = st.sampled_from([8, 16, 32, 64])
images = st.builds(Size, sides, sides)


@st.composite
def resolutions(draw: st.DrawFn, smallest: int = 64) -> Size:
    side = st.integers(smallest, 2048)
    return draw(st.one_of(st.builds(Size, side, side), side.map(lambda both: Size(both, both))))


def listed(resolution: Size, step: int) -> list[tuple[int, int]]:
    """The list of buckets as musubi-tuner writes it down."""
    area = resolution.width * resolution.height
    longest = int(math.sqrt(area))
    shortest = longest // 2
    shortest -= shortest % step
    found = []
    width = max(shortest, step)  # it never starts at 0 for the sizes it is used with
    while width <= longest:
        height = area // width
        height -= height % step
        found.append((width, height))
        found.append((height, width))
        width += step
    return sorted(set(found))


@settings(deadline=None)
@given(resolutions(), steps)
def test_buckets_are_those_of_the_rules(resolution: Size, step: int) -> None:
    assert list(bucket_sizes(resolution, step)) == listed(resolution, step)


@settings(deadline=None)
@given(resolutions(), steps)
def test_buckets_are_multiples_of_the_step_of_no_more_than_the_area(
    resolution: Size, step: int
) -> None:
    for width, height in bucket_sizes(resolution, step):
        assert width % step == height % step == 0
        assert 0 < width * height <= resolution.width * resolution.height


@settings(deadline=None)
@given(resolutions(), steps)
def test_every_bucket_has_its_turned_twin_and_none_comes_twice(resolution: Size, step: int) -> None:
    sizes = bucket_sizes(resolution, step)
    assert {Size(height, width) for width, height in sizes} == set(sizes)
    assert sorted(set(sizes)) == list(sizes)


@settings(deadline=None)
@given(images, resolutions(), steps)
def test_an_image_gets_the_bucket_of_the_nearest_aspect(
    image: Size, resolution: Size, step: int
) -> None:
    chosen = target_size(image, resolution, fit="bucket", step=step)
    sizes = listed(resolution, step)
    assert chosen in sizes
    errors = [abs(width / height - image.width / image.height) for width, height in sizes]
    assert sizes.index(tuple(chosen)) == errors.index(min(errors))


def test_the_first_bucket_wins_a_tie() -> None:
    # Between 384 / 672 and 448 / 576 lies no float tie; two aspects equally far apart make one.
    sizes = bucket_sizes(Size(64, 64), 16)
    low, high = sizes[0], sizes[1]
    middle = (Fraction(*low) + Fraction(*high)) / 2
    image = Size(middle.numerator, middle.denominator)
    aspect = image.width / image.height
    assert abs(low.width / low.height - aspect) == abs(high.width / high.height - aspect)
    assert target_size(image, Size(64, 64), fit="bucket") == low


@settings(deadline=None)
@given(images, resolutions())
def test_crop_is_the_resolution_itself(image: Size, resolution: Size) -> None:
    assert target_size(image, resolution, fit="crop") == resolution
    assert target_size(image, resolution, fit="crop", no_upscale=True) == resolution


@settings(deadline=None)
@given(images, resolutions(), steps)
def test_no_upscale_keeps_small_images_rounded_down(
    image: Size, resolution: Size, step: int
) -> None:
    assume(min(image) >= step)
    chosen = target_size(image, resolution, fit="bucket", step=step, no_upscale=True)
    if image.width * image.height <= resolution.width * resolution.height:
        assert chosen == (image.width - image.width % step, image.height - image.height % step)
        assert place(image, chosen).resized <= image
    else:
        assert chosen == target_size(image, resolution, fit="bucket", step=step)


@settings(deadline=None)
@given(st.integers(1, 15), st.integers(1, 4096))
def test_no_upscale_never_gives_an_empty_side(width: int, height: int) -> None:
    chosen = target_size(Size(width, height), Size(4096, 64), fit="bucket", no_upscale=True)
    assert min(chosen) >= 16


@settings(deadline=None)
@given(images, st.builds(Size, st.integers(8, 2048), st.integers(8, 2048)))
def test_a_placement_covers_its_target_and_keeps_the_centre(image: Size, target: Size) -> None:
    resized, left, top, kept = place(image, target)
    assert kept == target
    assert resized.width >= target.width
    assert resized.height >= target.height
    assert target.width == resized.width or target.height == resized.height
    for cut, whole, part in (
        (left, resized.width, target.width),
        (top, resized.height, target.height),
    ):
        rest = whole - part - cut
        assert cut >= 0
        assert rest - cut in (0, 1)


@settings(deadline=None)
@given(images, st.builds(Size, st.integers(8, 2048), st.integers(8, 2048)))
def test_a_placement_scales_both_sides_alike(image: Size, target: Size) -> None:
    resized = place(image, target).resized
    scale = max(Fraction(target.width, image.width), Fraction(target.height, image.height))
    assert abs(resized.width - image.width * scale) <= 1
    assert abs(resized.height - image.height * scale) <= 1


@settings(deadline=None)
@given(images)
def test_an_image_of_the_right_size_is_left_alone(image: Size) -> None:
    assert place(image, image) == (image, 0, 0, image)


def test_numbers_of_the_rules() -> None:
    sizes = bucket_sizes(Size(512, 512), 16)
    assert sizes[0] == (256, 1024)
    assert sizes[-1] == (1024, 256)
    assert (512, 512) in sizes
    assert target_size(Size(1000, 1000), Size(512, 512), fit="bucket") == (512, 512)
    assert place(Size(300, 200), Size(64, 64)) == ((96, 64), 16, 0, (64, 64))


def test_a_resolution_smaller_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="has no buckets"):
        bucket_sizes(Size(32, 32), 64)


# -- Wan ------------------------------------------------------------------------------------------


def wan_listed(resolution: Size) -> list[tuple[int, int]]:
    """The list of buckets as musubi-tuner's code makes it, which is longer than its rule says."""
    area = resolution.width * resolution.height
    root = int(math.sqrt(area))
    widths = range(root // 2 - root // 2 % 16, root + 16, 16)
    one_way = [(width, area // width - area // width % 16) for width in widths]
    return sorted({*one_way, *((height, width) for width, height in one_way)})


@settings(deadline=None)
@given(images, resolutions(32))
def test_wan_takes_the_first_bucket_of_the_nearest_aspect(image: Size, resolution: Size) -> None:
    sizes = wan_listed(resolution)
    aspects = np.array([width / height for width, height in sizes])
    nearest = int(np.abs(aspects - image.width / image.height).argmin())
    assert wan_size(image, resolution, bucket=True, no_upscale=False) == sizes[nearest]


def test_wan_has_buckets_beyond_the_square_root() -> None:
    resolution = Size(160, 192)  # int(sqrt(160 * 192)) is 175
    assert Size(160, 176) not in bucket_sizes(resolution, 16)
    assert wan_size(Size(160, 176), resolution, bucket=True, no_upscale=False) == (160, 176)
    assert wan_size(Size(17, 16), resolution, bucket=True, no_upscale=False) == (176, 160)


@pytest.mark.parametrize("side", [64, 256, 512, 960, 1024])
def test_wan_has_the_same_buckets_as_all_where_the_root_is_a_multiple(side: int) -> None:
    resolution = Size(side, side)
    for width, height in bucket_sizes(resolution, 16):
        image = Size(width * 3, height * 3)
        chosen = wan_size(image, resolution, bucket=True, no_upscale=False)
        assert chosen == target_size(image, resolution, fit="bucket")


@settings(deadline=None)
@given(images, resolutions(32))
def test_wan_puts_a_bucket_into_itself(image: Size, resolution: Size) -> None:
    # Its trainer computes the bucket of a clip from the size of that very bucket.
    bucket = wan_size(image, resolution, bucket=True, no_upscale=False)
    assert wan_size(bucket, resolution, bucket=True, no_upscale=False) == bucket


@settings(deadline=None)
@given(images, st.builds(Size, sides, sides), st.booleans())
def test_wan_without_buckets_is_the_resolution_itself(
    image: Size, resolution: Size, keep: bool
) -> None:
    assert wan_size(image, resolution, bucket=False, no_upscale=keep) == resolution


@settings(deadline=None)
@given(images, resolutions(32))
def test_wan_keeps_small_images_rounded_down(image: Size, resolution: Size) -> None:
    chosen = wan_size(image, resolution, bucket=True, no_upscale=True)
    if image.width * image.height <= resolution.width * resolution.height:
        assert chosen == (max(image.width >> 4 << 4, 16), max(image.height >> 4 << 4, 16))
    else:
        assert chosen == wan_size(image, resolution, bucket=True, no_upscale=False)


def test_a_resolution_without_wan_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="31 x 32 has no buckets"):
        wan_size(Size(64, 64), Size(31, 32), bucket=True, no_upscale=False)
    assert wan_size(Size(9, 9), Size(32, 32), bucket=True, no_upscale=False) == (32, 32)
