"""Sizes follow the rules of musubi-tuner and sd-scripts, transcribed here a second time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.base.errors import SourceError
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.datasets import Bucketing, Dataset
from latentmake.config.fields import Resolution
from latentmake.geometry.buckets import (
    Placement,
    Size,
    control_size,
    cover,
    crop_ltrb,
    nearest_bucket,
    refuse_odd,
    shrink,
)
from latentmake.layouts.layout import layout_of

LIMIT = 10**12  # pixels
BUCKETS = Dataset(path="x", fit="bucket")
sides = st.integers(1, 6000)
images = st.builds(Size, sides, sides)
steps = st.sampled_from([8, 16, 32, 64])


@st.composite
def resolutions(draw: st.DrawFn, smallest: int = 64) -> Size:
    side = st.integers(smallest, 2048)
    return draw(st.one_of(st.builds(Size, side, side), side.map(lambda both: Size(both, both))))


def listed(resolution: Size, step: int) -> list[tuple[int, int]]:
    """The list of buckets by musubi-tuner's rule."""
    area = resolution.width * resolution.height
    longest = int(math.sqrt(area))
    width = max(longest // 2 - longest // 2 % step, step)
    found = set()
    while width <= longest:
        height = area // width
        height -= height % step
        found |= {(width, height), (height, width)}
        width += step
    return sorted(found)


def wan_listed(resolution: Size) -> list[tuple[int, int]]:
    """The list of buckets as musubi-tuner's code makes it, which is longer than its rule says."""
    area = resolution.width * resolution.height
    root = int(math.sqrt(area))
    widths = range(root // 2 - root // 2 % 16, root + 16, 16)
    one_way = [(width, area // width - area // width % 16) for width in widths]
    return sorted({*one_way, *((height, width) for width, height in one_way)})


def bucket(image: Size, resolution: Size, step: int = 16, **changes: object) -> Size:
    section = BUCKETS.model_copy(update={"bucket_reso_steps": step, **changes})
    return layout_of("plain").size(image, resolution, section)


def wan_bucket(image: Size, resolution: Size, **changes: object) -> Size:
    return layout_of("musubi").size(image, resolution, BUCKETS.model_copy(update=changes))


def nearest(image: Size, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    errors = np.array([width / height for width, height in sizes]) - image.width / image.height
    return sizes[int(np.abs(errors).argmin())]


@settings(deadline=None)
@given(images, resolutions(), steps)
def test_an_image_gets_the_first_bucket_of_the_nearest_aspect(
    image: Size, resolution: Size, step: int
) -> None:
    assert bucket(image, resolution, step) == nearest(image, listed(resolution, step))
    wan = wan_bucket(image, resolution)
    assert wan == nearest(image, wan_listed(resolution))
    # Wan's trainer computes the bucket of a clip from the size of that very bucket.
    assert wan_bucket(wan, resolution) == wan


@settings(deadline=None)
@given(images, resolutions(), steps)
def test_no_upscale_keeps_small_images_rounded_down(
    image: Size, resolution: Size, step: int
) -> None:
    chosen = bucket(image, resolution, step, bucket_no_upscale=True)
    wan = wan_bucket(image, resolution, bucket_no_upscale=True)
    if image.width * image.height <= resolution.width * resolution.height:
        assert chosen == tuple(max(side - side % step, step) for side in image)
        assert wan == tuple(max(side >> 4 << 4, 16) for side in image)
    else:
        assert (chosen, wan) == (bucket(image, resolution, step), wan_bucket(image, resolution))


def check_covers(image: Size, found: Placement) -> None:
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
@given(images, st.builds(Size, st.integers(8, 2048), st.integers(8, 2048)))
def test_a_target_is_covered_and_the_centre_kept(image: Size, target: Size) -> None:
    found = cover(image, target, LIMIT)
    assert found.target == target
    check_covers(image, found)
    assert cover(target, target, LIMIT) == (target, 0, 0, target)


def test_a_narrow_image_is_refused_where_it_would_grow_beyond_the_limit() -> None:
    assert cover(Size(300, 200), Size(64, 64), LIMIT) == ((96, 64), 16, 0, (64, 64))
    assert cover(Size(1, 100), Size(10, 10), 10_000).resized == (10, 1000)
    with pytest.raises(SourceError, match=r"a\.png: is too narrow \(1 x 100\): .* 10000 pixels"):
        cover(Size(1, 100), Size(10, 10), 9_999, "a.png")


@st.composite
def asked(draw: st.DrawFn) -> tuple[Size, int, int, int]:
    """A resolution, steps, and sides of buckets that sd-scripts takes."""
    step = draw(st.sampled_from([32, 64, 128]))
    least = step * draw(st.integers(1, 4))
    resolution = Size(draw(st.integers(least, 2048)), draw(st.integers(least, 2048)))
    most = step * draw(st.integers(math.ceil(max(resolution) / step), 80))
    return resolution, step, least, most


@settings(deadline=None)
@given(images, asked())
def test_sd_scripts_takes_the_bucket_of_the_nearest_aspect_or_the_image_s_own(
    image: Size, question: tuple[Size, int, int, int]
) -> None:
    resolution, step, least, most = question
    area = resolution.width * resolution.height
    sizes = {(int(math.sqrt(area) // step) * step,) * 2}
    width = least
    while width <= most:
        height = min(most, int((area // width) // step) * step)
        if height >= least:
            sizes |= {(width, height), (height, width)}
        width += step
    found = nearest_bucket(image, resolution, range(least, most + 1, step), most)
    assert found == (image if image in sizes else nearest(image, sorted(sizes)))
    left, top, right, bottom = crop_ltrb(found, image)
    assert 0 <= left <= right <= found.width + 1e-6 and 0 <= top <= bottom <= found.height + 1e-6
    assert math.isclose((right - left) * image.height, (bottom - top) * image.width, rel_tol=1e-9)
    assert left == left // 1 and top == top // 1


@settings(deadline=None)
@given(images, asked())
def test_sd_scripts_without_upscaling_makes_nothing_grow(
    image: Size, question: tuple[Size, int, int, int]
) -> None:
    resolution, step, _, _ = question
    area, aspect = resolution.width * resolution.height, image.width / image.height
    try:
        resized, left, top, target = shrink(image, resolution, step)
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


def test_sd_scripts_refuses_an_image_smaller_than_a_step_where_nothing_grows() -> None:
    section = Dataset(path="x", fit="bucket", bucket_no_upscale=True)
    with pytest.raises(SourceError, match=r"a\.png: is smaller than a step of 64 .* \(63 x 400\)"):
        layout_of("sdscripts-sd1").place(Size(63, 400), Size(512, 512), section, "a.png")


def test_steps_and_limits_are_those_of_the_architecture_rounded_to_the_steps() -> None:
    plain = Dataset(path="x", fit="bucket")
    assert plain.bucketing(ARCHITECTURES["sd1"]) == Bucketing(64, False, 256, 1024)
    assert plain.bucketing(ARCHITECTURES["sdxl"]).bucket_reso_steps == 32
    odd = Dataset(path="x", fit="bucket", min_bucket_reso=300, max_bucket_reso=1000)
    assert odd.bucketing(ARCHITECTURES["flux"]) == Bucketing(64, False, 256, 1024)


def of_controls(resolution: tuple[int, int] | None, keeps: bool) -> Dataset:
    wanted = resolution and Resolution(width=resolution[0], height=resolution[1])
    return Dataset.model_construct(control_resolution=wanted, no_resize_control=keeps)


@pytest.mark.parametrize(
    ("control", "resolution", "step", "keeps", "expected"),
    [
        (Size(1024, 1024), (1024, 1024), 16, False, (1024, 1024)),
        (Size(1920, 1080), (1024, 1024), 16, False, (1360, 768)),
        (Size(300, 700), (1024, 1024), 16, False, (672, 1552)),
        (Size(500, 400), (1024, 1024), 32, False, (1152, 896)),
        (Size(100, 71), None, 16, True, (96, 64)),
        # An image that has no more is not even rounded.
        (Size(100, 71), (128, 128), 16, True, (100, 71)),
        (Size(200, 200), (128, 64), 16, True, (80, 96)),
    ],
)
def test_a_control_image_keeps_its_size_or_gets_one_of_its_shape(
    control: Size,
    resolution: tuple[int, int] | None,
    step: int,
    keeps: bool,
    expected: tuple[int, int],
) -> None:
    assert control_size(control, of_controls(resolution, keeps), step) == expected


@pytest.mark.parametrize(
    ("control", "resolution", "keeps"),
    [(Size(15, 400), None, True), (Size(64, 200), (64, 64), False)],  # musubi-tuner divides by zero
)
def test_a_control_image_of_which_nothing_is_left_is_refused(
    control: Size, resolution: tuple[int, int] | None, keeps: bool
) -> None:
    with pytest.raises(SourceError, match="is too narrow for a control image"):
        control_size(control, of_controls(resolution, keeps), 16)


@pytest.mark.parametrize(
    ("control", "step", "cut"), [((104, 64), 16, 7), ((64, 111), 16, 7), ((97, 64), 32, 0)]
)
def test_a_control_image_that_keeps_a_size_without_whole_patches_is_refused(
    control: tuple[int, int], step: int, cut: int
) -> None:
    refuse_odd(Size(96, 64), step, cut)
    refuse_odd(Size(103, 71), 16, 7)
    line = r"keeps its size of {} x {} .*; cut it to .*: no_resize_control, control_resolution$"
    with pytest.raises(SourceError, match=line.format(*control)):
        refuse_odd(Size(*control), step, cut)
