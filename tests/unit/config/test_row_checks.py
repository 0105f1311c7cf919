"""A dataset that an architecture of musubi-tuner cannot take is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from controlled_world import configured
from latentmake.config.root import parse
from latentmake.errors import ConfigError

CONTROL = {"control_directory": "control"}
ONE_FRAME = {**CONTROL, "fp_1f_target_index": 9}


@pytest.mark.parametrize(
    ("architecture", "dataset"),
    [
        ("qwen_image", {}),
        ("qwen_image_edit", {**CONTROL, "no_resize_control": True, "control_resolution": 1024}),
        ("qwen_image_edit", {"path": "list.jsonl"}),
        ("qwen_image_layered", {"multiple_target": True}),
        ("flux_kontext", {**CONTROL, "control_resolution": [512, 768]}),
        ("flux_2_dev", {}),
        ("flux_2_dev", {**CONTROL, "no_resize_control": True}),
        ("framepack", {**ONE_FRAME, "fp_1f_clean_indices": [0, 10], "fp_1f_no_post": True}),
        ("framepack", {**ONE_FRAME, "fp_latent_window_size": 8}),
        ("hidream_o1", {**CONTROL, "control_resolution": 512}),
        ("wan", CONTROL),
        ("wan", {**CONTROL, "target_frames": [5]}),
    ],
)
def test_what_an_architecture_takes_is_accepted(architecture: str, dataset: dict[str, Any]) -> None:
    assert configured(architecture, **dataset)


@pytest.mark.parametrize(
    ("architecture", "dataset", "where", "what"),
    [
        (
            "qwen_image",
            {"target_frames": [5]},
            "runs.run.datasets",
            "the dataset pictures holds videos, and Qwen-Image takes only images; leave out its",
        ),
        (
            "framepack",
            {"target_frames": [37], "fit": "crop"},
            "datasets.pictures.fit: ",
            "read videos cut to buckets, as stored; leave it out",
        ),
        ("qwen_image", CONTROL, "control_directory", "Qwen-Image takes no control images"),
        ("qwen_image_edit", {}, "control_directory", "Qwen-Image-Edit (edit-2509) needs control"),
        ("qwen_image_layered", {}, "multiple_target", "needs the layers of each image"),
        ("qwen_image", {"multiple_target": True}, "multiple_target", "has one target image"),
        ("qwen_image", {"no_resize_control": True}, "no_resize_control", "own size only"),
        (
            "framepack",
            {**ONE_FRAME, "control_resolution": 64},
            "control_resolution",
            "FramePack (one_frame) takes control images of the item's own size only",
        ),
        ("framepack", CONTROL, "fp_1f_target_index", "needs the index of the frame"),
        ("qwen_image", {"fp_1f_no_post": True}, "fp_1f_no_post", "is not trained on one frame"),
        ("flux_2_dev", {"fp_latent_window_size": 5}, "fp_latent_window_size", "has no sections"),
        ("wan", {**CONTROL, "control_resolution": 64}, "control_resolution", "Wan (t2v-1.3B)"),
        (
            "wan",
            {"target_frames": [5], "no_resize_control": True},
            "datasets.pictures",
            "`no_resize_control` is about images: leave it out, or leave out `target_frames`",
        ),
        (
            "qwen_image_layered",
            {"multiple_target": True, "missing_caption": "empty"},
            "datasets.pictures",
            "`missing_caption` is not for `multiple_target`, whose layers",
        ),
    ],
)
def test_what_it_does_not_take_is_refused(
    architecture: str, dataset: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(architecture, **dataset)
    line = str(caught.value)
    assert what in line
    assert where in line
    assert "\n" not in line and " | " not in line


def test_images_for_an_architecture_of_videos_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        configured("framepack", task="i2v")
    assert "the dataset pictures holds images, and FramePack (i2v) takes only videos" in str(
        caught.value
    )


def test_clips_shorter_than_a_section_are_refused() -> None:
    clips = {"target_frames": [37, 33], "fp_latent_window_size": 9}
    with pytest.raises(ConfigError) as caught:
        configured("framepack", task="f1", **clips)
    assert "33 frames are too few for a section of FramePack (f1), which has 9 latents" in str(
        caught.value
    )
    assert "use 37 or more" in str(caught.value)
    assert configured("framepack", task="f1", **{**clips, "fp_latent_window_size": 8})
    assert configured("framepack", task="f1", **clips, frame_extraction="full")


def test_batches_of_captions_that_do_not_stack_are_refused() -> None:
    config = configured("kandinsky5", task="k5-pro-t2v-5s-sd").model_dump(exclude_unset=True)
    config["runs"]["run"]["trainer"] = {"kind": "musubi", "batch_size": 2}
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert "Kandinsky 5 is trained on at most 1 item at a time" in str(caught.value)
    config["runs"]["run"]["trainer"]["batch_size"] = 1
    assert parse(config)
