"""Keys of items with several control images or layers: whatever shapes a cache is in its key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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
    found = keys(EDIT, no_resize_control=True, **CONTROL)  # which have one size at each
    assert found["text@64", "cat"] == found["text@96", "cat"]


CHANGES: dict[str, tuple[str, dict[str, Any], str, set[tuple[str, str]]]] = {
    "first control": (EDIT, CONTROL, "control/cat_0.png", of("cat")),
    "second control": (EDIT, CONTROL, "control/cat_1.png", of("cat")),
    "control that no text reads": (
        "flux_2_dev", CONTROL, "control/cat_1.png", of("cat", "64", "96")
    ),
    "picture": (EDIT, CONTROL, "data/dog.png", of("dog", "64", "96")),
    "caption": (EDIT, CONTROL, "data/cat.txt", of("cat", "text@64", "text@96")),
    "layer": (
        "qwen_image_layered", {"multiple_target": True}, "data/dog_2.png", of("dog", "64", "96")
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "dataset", "name", "expected"), CHANGES.values(), ids=CHANGES
)
def test_a_changed_file_changes_what_reads_it(
    architecture: str, dataset: dict[str, Any], name: str, expected: set[tuple[str, str]]
) -> None:
    for number in (1, 2) if "multiple_target" in dataset else ():
        for stem in ("cat", "dog"):
            draw(f"data/{stem}_{number}.png", 4)
    before = keys(architecture, **dataset)
    if name.endswith(".txt"):
        Path(name).write_text("another cat\n")
    else:
        draw(name, 99)
    assert changed(before, keys(architecture, **dataset)) == expected


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


def test_the_shape_of_a_picture_changes_the_text_for_which_controls_are_cut_to_it() -> None:
    before = keys(EDIT, **CONTROL)
    draw("data/cat.png", size=(48, 64))
    assert changed(before, keys(EDIT, **CONTROL)) == of("cat")
    own = {**CONTROL, "control_resolution": 64}
    draw("data/cat.png", size=(64, 48))
    before = keys(EDIT, **own)
    draw("data/cat.png", size=(48, 64))
    assert changed(before, keys(EDIT, **own)) == of("cat", "64", "96")


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
