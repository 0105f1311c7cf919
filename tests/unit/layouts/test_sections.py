"""FramePack's clips have a file for each section; frame rates are those of each architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from item_world import work_of
from latentmake.config.architectures import MUSUBI
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, kept_indices, sections
from latentmake.layouts.layout import layout_of
from latentmake.plan.orders import Order, Target

FRAMEPACK = layout_of("musubi-framepack")
MEDIA = Media(96, 64, 100)


def dataset(**settings: object) -> Dataset:
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
    settings = dataset(target_frames=[9, 17], fp_latent_window_size=2)
    assert names(settings) == [
        "f/walk_00000-009-0000_0080x0048_fp.safetensors",
        "f/walk_00000-017-0000_0080x0048_fp.safetensors",
        "f/walk_00000-017-0001_0080x0048_fp.safetensors",
    ]
    assert names(settings.model_copy(update={"fp_latent_window_size": 4})) == [
        "f/walk_00000-017-0000_0080x0048_fp.safetensors"
    ]


def test_a_whole_video_is_cut_to_its_sections_and_one_too_short_has_none() -> None:
    settings = dataset(frame_extraction="full", max_frames=1000)
    assert names(settings) == [
        f"f/walk_00000-097-{section:04d}_0080x0048_fp.safetensors" for section in range(2)
    ]
    assert FRAMEPACK.clips(Media(96, 64, 36), settings) == []


def test_files_of_sections_belong_to_their_item_and_differ_in_their_keys() -> None:
    settings = dataset(target_frames=[73])
    named = FRAMEPACK.named("f", "64", "walk", MEDIA, settings)
    assert [clip for _, clip in named] == [Clip(0, 73, 0), Clip(0, 73, 1)]
    keys = {FRAMEPACK.view(Size(96, 64), Size(64, 64), settings, clip=x)[0] for _, x in named}
    assert len(keys) == 2
    for path, _ in named:
        assert "walk" in FRAMEPACK.owners(path.removeprefix("f/"))


def test_a_work_order_tells_sections_from_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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
        dataset(),
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
    wan, settings = layout_of("musubi"), dataset()
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
    settings = dataset(source_fps=2 * rate, frame_extraction="full", max_frames=1000)
    assert layout.clips(MEDIA, settings) == [Clip(0, 49)]
    assert layout_of("musubi").clips(MEDIA, settings)[0].frames < 49
