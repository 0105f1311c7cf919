"""Views of latents say what is done to a picture: they differ where pixels do, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from item_world import work_of
from latentmake.base.errors import SourceError
from latentmake.config.architectures import MUSUBI
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.pixels import plain, scaling
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, kept_indices, sections
from latentmake.layouts.layout import Layout, kind_of, layout_of, resolution_of
from latentmake.plan.orders import Order, Target

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
        ("a folder of others", "captions", None),
    ],
)
def test_the_name_of_a_part_says_what_it_holds(
    name: str, kind: str, resolution: tuple[int, int] | None
) -> None:
    assert (kind_of(name), resolution_of(name)) == (kind, resolution)


FRAMEPACK = layout_of("musubi-framepack")
MEDIA = Media(96, 64, 100)


def clips_of(**settings: object) -> Dataset:
    return Dataset.model_validate({"path": "clips", "target_frames": [37], **settings})


def names(settings: Dataset, media: Media = MEDIA) -> list[str]:
    return [path for path, _ in FRAMEPACK.named("f", "64", "sub/walk", media, settings)]


@pytest.mark.parametrize(
    ("frames", "window", "count"), [(1, 9, 0), (36, 9, 0), (37, 9, 1), (72, 9, 1), (73, 9, 2)]
)
def test_a_clip_has_as_many_sections_as_whole_windows_follow_its_first_frame(
    frames: int, window: int, count: int
) -> None:
    assert len(sections(Clip(0, frames), window)) == count


def test_each_section_has_a_file_named_as_the_script_does() -> None:
    settings = clips_of(target_frames=[9, 17], fp_latent_window_size=2)
    assert names(settings) == [
        "f/walk_00000-009-0000_0080x0048_fp.safetensors",
        "f/walk_00000-017-0000_0080x0048_fp.safetensors",
        "f/walk_00000-017-0001_0080x0048_fp.safetensors",
    ]
    assert names(settings.model_copy(update={"fp_latent_window_size": 4})) == [
        "f/walk_00000-017-0000_0080x0048_fp.safetensors"
    ]


def test_a_whole_video_is_cut_to_its_sections_and_one_too_short_has_none() -> None:
    settings = clips_of(frame_extraction="full", max_frames=1000)
    assert names(settings) == [
        f"f/walk_00000-097-{section:04d}_0080x0048_fp.safetensors" for section in range(2)
    ]
    assert FRAMEPACK.clips(Media(96, 64, 36), settings) == []


def test_files_of_sections_belong_to_their_item_and_differ_in_their_keys() -> None:
    settings = clips_of(target_frames=[73])
    named = FRAMEPACK.named("f", "64", "walk", MEDIA, settings)
    assert [clip for _, clip in named] == [Clip(0, 73, 0), Clip(0, 73, 1)]
    keys = {FRAMEPACK.view(Size(96, 64), Size(64, 64), settings, clip=x)[0] for _, x in named}
    assert len(keys) == 2
    for path, _ in named:
        assert "walk" in FRAMEPACK.owners(path.removeprefix("f/"))


def test_a_work_order_tells_sections_from_clips(working: Path) -> None:
    texts = ["llama", "clip"]
    model = {"architecture": "framepack", "task": "f1", "vae": "vae", "text": texts}
    targets = (
        Target("64", "a", None, Size(64, 64), Clip(0, 73)),
        Target("64", "b", None, Size(64, 64), Clip(0, 73, 1)),
    )
    order = Order(
        "latents",
        "clips",
        "fp",
        clips_of(),
        Model.model_validate({**model, "image_encoder": "siglip"}),
        {"format": 1},
        (work_of("walk", "walk.mp4", None, targets, media=MEDIA),),
    )
    order.write()
    found = Order.read(order.path)
    assert [each.clip for each in found.items[0].targets] == [Clip(0, 73), Clip(0, 73, 1)]
    items = order.path.with_suffix(".items.json").read_text()
    assert ",[0,73]," in items and ",[0,73,1]," in items
    assert found == order and found.name == order.name


def test_names_and_keys_of_clips_without_sections_stay() -> None:
    wan, settings = layout_of("musubi"), clips_of()
    ((path, clip),) = wan.named("f", "64", "walk", MEDIA, settings)
    assert path == "f/walk_00000-037_0080x0048_wan.safetensors"
    assert clip == Clip(0, 37)
    assert wan.view(Size(96, 64), Size(64, 64), settings, clip=clip)[0] == "80x48:0-37"
    assert "walk" not in wan.owners("walk_00000-037-0000_0080x0048_wan.safetensors")


@pytest.mark.parametrize(
    ("architecture", "rate"),
    [("hunyuan_video", 24), ("hunyuan_video_1_5", 24), ("kandinsky5", 24), ("framepack", 30)],
)
def test_frames_are_dropped_to_the_rate_of_the_architecture(architecture: str, rate: int) -> None:
    layout = layout_of(f"musubi-{architecture}")
    assert layout.rate == MUSUBI[architecture].fps == rate
    kept = kept_indices(100, 2.0 * rate, rate=layout.rate)
    assert [index for index, _ in kept] == list(range(0, 100, 2))
    settings = clips_of(source_fps=2 * rate, frame_extraction="full", max_frames=1000)
    assert layout.clips(MEDIA, settings) == [Clip(0, 49)]
    assert layout_of("musubi").clips(MEDIA, settings)[0].frames < 49
