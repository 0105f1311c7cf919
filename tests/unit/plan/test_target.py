"""Keys of items with several control images or layers: whatever shapes a cache is in its key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from controlled_world import draw, keys, put

EDIT = "qwen_image_edit"
CONTROL = {"control_directory": "control"}
Keys = dict[tuple[str, str], str]


@pytest.fixture(autouse=True)
def _two_pictures_with_two_controls_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put("cat", "dog")
    for number, name in enumerate(("cat_0", "cat_1", "dog_0", "dog_1")):
        draw(f"control/{name}.png", number + 5, (80, 36 + 16 * number))


def changed(before: Keys, after: Keys) -> set[tuple[str, str]]:
    assert before.keys() == after.keys()
    return {target for target, key in before.items() if after[target] != key}


def of(stem: str, *parts: str) -> set[tuple[str, str]]:
    return {(part, stem) for part in parts or ("64", "96", "text@64", "text@96")}


def test_text_that_reads_controls_has_a_key_for_each_resolution() -> None:
    found = keys(EDIT, **CONTROL)
    assert len(set(found.values())) == len(found) == 8
    for architecture in ("flux_2_dev", "qwen_image"):
        found = keys(architecture, **(CONTROL if architecture == "flux_2_dev" else {}))
        assert found["text@64", "cat"] == found["text@96", "cat"]


@pytest.mark.parametrize("name", ["control/cat_0.png", "control/cat_1.png"])
def test_a_changed_control_changes_latents_and_text_of_its_item_alone(name: str) -> None:
    before = keys(EDIT, **CONTROL)
    draw(name, 99, (80, 40))
    assert changed(before, keys(EDIT, **CONTROL)) == of("cat")


def test_only_latents_depend_on_controls_that_no_text_reads() -> None:
    before = keys("flux_2_dev", **CONTROL)
    draw("control/cat_1.png", 99)
    assert changed(before, keys("flux_2_dev", **CONTROL)) == of("cat", "64", "96")


def test_a_control_more_or_in_another_place_changes_its_item() -> None:
    before = keys(EDIT, **CONTROL)
    draw("control/dog_7.png", 3)
    assert changed(before, keys(EDIT, **CONTROL)) == of("dog")
    Path("control/dog_7.png").unlink()
    shutil.move("control/dog_0.png", "control/dog_3.png")
    assert changed(before, keys(EDIT, **CONTROL)) == of("dog")
    shutil.move("control/dog_1.png", "control/dog_9.png")
    shutil.move("control/dog_3.png", "control/dog.png")  # the same files in the same order
    assert not changed(before, keys(EDIT, **CONTROL))


def test_a_changed_caption_changes_its_text_and_a_changed_picture_its_latents() -> None:
    before = keys(EDIT, **CONTROL)
    Path("data/cat.txt").write_text("another cat\n")
    draw("data/dog.png", 77)
    found = changed(before, keys(EDIT, **CONTROL))
    assert found == of("cat", "text@64", "text@96") | of("dog", "64", "96")


def test_the_shape_of_a_picture_changes_the_text_for_which_controls_are_cut_to_it() -> None:
    before = keys(EDIT, **CONTROL)
    draw("data/cat.png", size=(48, 64))
    assert changed(before, keys(EDIT, **CONTROL)) == of("cat")
    own = {**CONTROL, "control_resolution": 64}
    draw("data/cat.png", size=(64, 48))
    before = keys(EDIT, **own)
    draw("data/cat.png", size=(48, 64))
    assert changed(before, keys(EDIT, **own)) == of("cat", "64", "96")


def test_text_of_controls_of_one_size_at_all_resolutions_is_one() -> None:
    found = keys(EDIT, no_resize_control=True, **CONTROL)
    assert found["text@64", "cat"] == found["text@96", "cat"]


def test_sizes_of_controls_count_by_what_is_done_to_them() -> None:
    before = keys(EDIT, **CONTROL)
    own = keys(EDIT, no_resize_control=True, **CONTROL)
    assert len(changed(before, own)) == 8
    # cat_0 is 80 x 36, cat_1 80 x 52, dog_0 80 x 68, dog_1 80 x 84: a limit above all changes
    # nothing but what was rounded.
    limit = keys(EDIT, no_resize_control=True, control_resolution=90, **CONTROL)
    assert changed(own, limit) == of("cat") | of("dog")
    assert not changed(limit, keys(EDIT, no_resize_control=True, control_resolution=91, **CONTROL))
    less = keys(EDIT, no_resize_control=True, control_resolution=80, **CONTROL)
    assert changed(limit, less) == of("dog")


def test_controls_of_the_size_of_their_bucket_have_the_keys_of_those_brought_to_it() -> None:
    for name in ("control/cat_0", "control/cat_1", "data/cat"):
        draw(f"{name}.png", size=(64, 64))
    before = keys(EDIT, **CONTROL)
    own = keys(EDIT, no_resize_control=True, **CONTROL)
    assert changed(before, own) == of("cat", "96", "text@96") | of("dog")


def test_layers_are_part_of_the_latents() -> None:
    for name in ("cat_1", "cat_2", "dog_1", "dog_2"):
        draw(f"data/{name}.png", 4)
    before = keys("qwen_image_layered", multiple_target=True)
    draw("data/dog_2.png", 5)
    assert changed(before, keys("qwen_image_layered", multiple_target=True)) == of(
        "dog", "64", "96"
    )
