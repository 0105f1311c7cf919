"""A dataset that an architecture of musubi-tuner cannot take is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from controlled_world import configured
from latentmake.base.errors import ConfigError
from latentmake.config.root import parse

CONTROL = {"control_directory": "control"}
ONE_FRAME = {**CONTROL, "fp_1f_target_index": 9}
SECTIONS = {"task": "f1", "target_frames": [37, 33]}


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
        ("framepack", {**SECTIONS, "fp_latent_window_size": 8}),
        ("framepack", {**SECTIONS, "frame_extraction": "full"}),
    ],
)
def test_what_an_architecture_takes_is_accepted(architecture: str, dataset: dict[str, Any]) -> None:
    assert configured(architecture, **dataset)


@pytest.mark.parametrize(
    ("architecture", "dataset", "key", "what"),
    [
        ("qwen_image", {"target_frames": [5]}, "target_frames", "Qwen-Image takes no videos"),
        ("framepack", {"task": "i2v"}, "target_frames", "(i2v) needs this key; set the lengths"),
        ("framepack", {"target_frames": [37], "fit": "crop"}, "fit", "cut to buckets, as stored"),
        (
            "framepack",
            SECTIONS,
            "target_frames",
            "33 frames are too few for a section of FramePack",
        ),
        ("qwen_image", CONTROL, "control_directory", "Qwen-Image takes no control images"),
        ("qwen_image_edit", {}, "control_directory", "(edit-2509) needs this key; name the folder"),
        ("qwen_image_layered", {}, "multiple_target", "needs this key; set it to true"),
        ("qwen_image", {"multiple_target": True}, "multiple_target", "has one target image"),
        ("qwen_image", {"no_resize_control": True}, "no_resize_control", "own size only"),
        ("framepack", {**ONE_FRAME, "control_resolution": 64}, "control_resolution", "own size"),
        ("framepack", CONTROL, "fp_1f_target_index", "needs this key; set it, usually to 9"),
        ("qwen_image", {"fp_1f_no_post": True}, "fp_1f_no_post", "is not trained on one frame"),
        ("flux_2_dev", {"fp_latent_window_size": 5}, "fp_latent_window_size", "has no sections"),
        ("wan", {**CONTROL, "control_resolution": 64}, "control_resolution", "Wan (t2v-1.3B)"),
    ],
)
def test_what_it_does_not_take_is_refused(
    architecture: str, dataset: dict[str, Any], key: str, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(architecture, **dataset)
    line = str(caught.value)
    assert line.startswith(f"datasets.pictures.{key}: ") and what in line
    assert "\n" not in line and " | " not in line


@pytest.mark.parametrize(
    ("architecture", "dataset", "what"),
    [
        ("wan", {"target_frames": [5], "no_resize_control": True}, "is about images: leave it out"),
        ("qwen_image_layered", {"multiple_target": True, "missing_caption": "empty"}, "layers"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(
    architecture: str, dataset: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^datasets\.pictures: .*`{[*dataset][1]}` .*{what}"):
        configured(architecture, **dataset)


def test_batches_of_captions_that_do_not_stack_are_refused() -> None:
    config = configured("kandinsky5", task="k5-pro-t2v-5s-sd").model_dump(exclude_unset=True)
    config["runs"]["run"]["trainer"] = {"kind": "musubi", "batch_size": 2}
    with pytest.raises(ConfigError, match="Kandinsky 5 is trained on at most 1 item at a time"):
        parse(config)
