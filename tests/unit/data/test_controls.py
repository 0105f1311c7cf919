"""Control images and layers belong to the items that musubi-tuner gives them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import video_world
from controlled_world import controls_of, draw, listed, put


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("control").mkdir()


def lines(architecture: str, **dataset: Any) -> list[str]:
    return [fault.line for fault in listed(architecture, **dataset)[1]]


def test_controls_stand_in_the_order_of_their_numbers() -> None:
    put("cat")
    for name in ("cat_10.png", "cat_2.jpg", "cat.webp", "cat_0.png"):
        draw(f"control/{name}")
    names = ["cat.webp", "cat_0.png", "cat_2.jpg", "cat_10.png"]
    assert controls_of("qwen_image_edit") == {"cat": names}


def test_a_control_belongs_to_the_longest_name_that_fits() -> None:
    put("a", "a_1", "a_b")
    for name in ("a_0", "a_1", "a_1_0", "a_b_3", "a_5"):
        draw(f"control/{name}.png")
    assert controls_of("flux_2_dev") == {
        "a": ["a_0.png", "a_5.png"],
        "a_1": ["a_1.png", "a_1_0.png"],
        "a_b": ["a_b_3.png"],
    }


def test_controls_of_items_in_folders_lie_in_folders_of_the_same_names() -> None:
    put("sub/a", "b")
    for name in ("sub/a_0.png", "b.png"):
        draw(f"control/{name}")
    assert controls_of("flux_kontext") == {"b": ["b.png"], "sub/a": ["a_0.png"]}


def test_equal_names_in_several_folders_are_several_items_where_caches_lie_flat() -> None:
    put("rain/a", "sun/a", "a", "sun/b", "fog/b", "fog_b")
    for name in ("rain/a_0", "sun/a_0", "a_0", "sun/b_0", "fog/b_0", "fog_b_0"):
        draw(f"control/{name}.png")
    items, faults = listed("flux_kontext", control_directory="control")
    assert faults == [] and list(items) == ["a", "fog/b", "fog_b", "rain_a", "sun_a", "sun_b"]
    for stem, item in items.items():  # `fog_b` is the name of another item
        name = stem.replace("rain_", "rain/").replace("sun_", "sun/")
        assert item.image == f"data/{name}.png" and item.controls == (f"control/{name}_0.png",)
    for name in ("rain/a", "rain_a", "sun/a"):
        Path(f"films/{name}").parent.mkdir(parents=True, exist_ok=True)
        video_world.write_video(Path(f"films/{name}.mp4"), "libx264", 5)
        Path(f"films/{name}.txt").write_text("a film")
    items, faults = listed("wan", path="films", target_frames=[5])
    assert faults == [] and list(items) == ["rain/a", "rain_a", "sun_a"]


def test_a_faulty_item_leaves_its_controls_to_no_other() -> None:
    put("a")
    draw("data/a_1.png")  # has no caption
    for name in ("a_0", "a_1_0"):
        draw(f"control/{name}.png")
    items, faults = listed("qwen_image_edit", control_directory="control")
    assert items["a"].controls == ("control/a_0.png",)
    assert [fault.stem for fault in faults] == ["a_1"]


def test_a_video_takes_the_control_of_its_own_name_before_that_of_another_ending() -> None:
    for name in ("films/a.mp4", "films/b.mp4", "control/a.mov", "control/a.mp4", "control/b.mov"):
        Path(name).parent.mkdir(exist_ok=True)
        video_world.write_video(Path(name), "libx264", 5)
        Path(name).with_suffix(".txt").write_text("a film")
    controls = controls_of("wan", task="t2v-1.3B-FC", path="films", target_frames=[5])
    assert controls == {"a": ["a.mp4"], "b": ["b.mov"]}


def test_a_wan_model_takes_the_control_of_the_very_name() -> None:
    put("a", "b")
    for name in ("a.png", "a_1.png", "a_sketch.png", "b.jpg", "b.png"):
        draw(f"control/{name}")
    assert controls_of("wan") == {"a": ["a.png"], "b": ["b.jpg"]}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "data/cat.png: has no control in control; put control/cat_0.png there"),
        (
            ["cat_0.png", "cat_1.png"],
            "has 2 control images in control, and FLUX.1 Kontext takes 1; ",
        ),
        (["cat_left.png"], "cat_left.png, whose name does not end in a number; name it cat"),
        (["cat_1.png", "cat_01.png"], "has two controls of the same number, control/cat_01.png"),
        (["cat.png", "cat.jpg"], "has two controls of the same number, control/cat.jpg and "),
    ],
)
def test_missing_odd_or_too_many_controls_are_said_in_one_line(
    names: list[str], expected: str
) -> None:
    put("cat", "dog")
    for name in (*names, "dog.png"):
        draw(f"control/{name}")
    items, faults = listed("flux_kontext", control_directory="control")
    assert items.keys() == {"dog"}
    (fault,) = faults
    assert expected in fault.line
    assert "\n" not in fault.line


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("control/cat_1.png", "has a control control/cat_1.png, which is a link that leads now"),
        ("control/drive", "control/drive: is a link that leads nowhere; mount its drive"),
        ("data/cat_1.png", "data/cat_1.png: is a link that leads nowhere; repair"),
    ],
)
def test_a_link_that_leads_nowhere_takes_no_control_from_an_item_and_gives_none(
    link: str, expected: str
) -> None:
    put("cat", "dog")
    for name in ("cat_0", "dog_0"):
        draw(f"control/{name}.png")
    if link.startswith("data"):
        draw("control/cat_1_0.png")
    Path(link).symlink_to("/not/mounted")
    items, faults = listed("qwen_image_edit", control_directory="control")
    assert items["dog"].controls == ("control/dog_0.png",)
    assert "cat" not in items or items["cat"].controls == ("control/cat_0.png",)
    (fault,) = faults
    assert expected in fault.line


def test_a_model_of_one_frame_takes_a_control_for_each_index() -> None:
    put("cat")
    for number in range(2):
        draw(f"control/cat_{number}.png")
    settings = {"control_directory": "control", "fp_1f_target_index": 9}
    (line,) = lines("framepack", **settings)
    assert "has 2 control images in control, and FramePack takes 1" in line
    assert not lines("framepack", fp_1f_clean_indices=[0, 1], **settings)
    (line,) = lines("framepack", fp_1f_clean_indices=[0, 1, 10], **settings)
    assert "takes 3" in line


def test_controls_that_keep_their_size_are_measured() -> None:
    put("cat")
    draw("control/cat_0.png", size=(40, 80))
    draw("control/cat_1.png", size=(100, 20))
    settings: dict[str, Any] = {"control_directory": "control"}
    assert listed("qwen_image_edit", **settings)[0]["cat"].control_sizes == ()
    (item,) = listed("qwen_image_edit", no_resize_control=True, **settings)[0].values()
    assert item.control_sizes == ((40, 80), (100, 20))
    draw("control/cat_1.png", size=(100, 15))
    (line,) = lines("qwen_image_edit", no_resize_control=True, **settings)
    assert "control/cat_1.png, which is too narrow for a control image (100 x 15 pixels)" in line
    Path("control/cat_1.png").write_bytes(b"no image")
    (line,) = lines("qwen_image_edit", no_resize_control=True, **settings)
    assert "data/cat.png: has a control control/cat_1.png, which" in line


def write(*rows: dict[str, object]) -> dict[str, Any]:
    Path("list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"path": "list.jsonl"}


def row(**columns: object) -> dict[str, object]:
    return {"image_path": "data/cat.png", "caption": "a cat", **columns}


def test_rows_name_their_controls() -> None:
    put("cat")
    for number in range(3):
        draw(f"other/{number}.png")
    columns = {f"control_path_{number}": f"other/{number}.png" for number in (2, 0, 1)}
    items, faults = listed("qwen_image_edit", **write(row(**columns)))
    assert not faults
    assert items["data/cat"].controls == ("./other/0.png", "./other/1.png", "./other/2.png")
    items, _ = listed("flux_kontext", **write(row(control_path="other/1.png")))
    assert items["data/cat"].controls == ("./other/1.png",)


def test_items_of_a_list_may_have_a_folder_of_controls() -> None:
    put("cat")
    draw("control/data/cat_0.png")
    assert controls_of("flux_kontext", **write(row())) == {"data/cat": ["cat_0.png"]}


def test_a_wan_model_and_one_without_controls_leave_the_columns_alone() -> None:
    put("cat")
    settings = write(row(control_path="nowhere.png"))
    for architecture in ("wan", "qwen_image"):
        items, faults = listed(architecture, **settings)
        assert not faults
        assert items["data/cat"].controls == ()
        assert items["data/cat"].row == {"control_path": "nowhere.png"}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, "has 0 control images in its row, and Qwen-Image-Edit takes 1 or more"),
        ({"control_path": "nowhere.png"}, "has a control ./nowhere.png, which does not exist"),
        ({"control_path": "../a.png"}, "outside the list's folder"),
        ({"control_path_x": "a.png"}, "has 0 control images in its row"),
        ({"control_path_0": 3}, "has control_path_0: 3, which is no path"),
    ],
)
def test_a_row_with_bad_controls_is_named(columns: dict[str, object], expected: str) -> None:
    put("cat", "dog")
    good = row(image_path="data/dog.png", control_path="data/dog.png")
    items, faults = listed("qwen_image_edit", **write(row(**columns), good))
    assert items.keys() == {"data/dog"}
    (fault,) = faults
    assert expected in fault.line
    assert "data/cat.png" in fault.line


def layered(**changes: Any) -> tuple[dict[str, list[str]], list[str]]:
    items, faults = listed("qwen_image_layered", multiple_target=True, **changes)
    found = {stem: [Path(x).name for x in item.layers] for stem, item in items.items()}
    return found, [fault.line for fault in faults]


def test_images_without_a_caption_are_layers_of_the_longest_name_that_fits() -> None:
    put("a", "a_1", "sub/b")
    for name in ("a_2", "a_10", "a_1_0", "a_1_1", "sub/b_1", "sub/b_2"):
        draw(f"data/{name}.png")
    assert layered() == (
        {"a": ["a_2.png", "a_10.png"], "a_1": ["a_1_0.png", "a_1_1.png"],
         "sub/b": ["b_1.png", "b_2.png"]}, []
    )  # fmt: skip


def test_items_with_another_number_of_layers_than_most_are_faulty() -> None:
    put("a", "b", "c", "d")
    for name in ("a_1", "a_2", "b_1", "b_2", "c_1"):
        draw(f"data/{name}.png")
    found, faults = layered()
    assert found.keys() == {"a", "b"}
    assert "data/c.png: has 1 layer, and others 2; name them c_1, c_2 and so on" in faults[0]
    assert "data/d.png: has no layers, and others 2" in faults[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_1.jpg", "has two layers of the same number, data/a_1.jpg and data/a_1.png"),
        ("a_sky.png", "has a layer data/a_sky.png, whose name does not end in a number"),
        ("b_1.png", "data/b_1.png: has no caption file"),
    ],
)
def test_an_odd_layer_is_named(name: str, expected: str) -> None:
    put("a")
    draw("data/a_1.png")
    draw(f"data/{name}")
    assert expected in layered()[1][0]


def test_rows_name_their_layers() -> None:
    put("cat")
    for number in range(3):
        draw(f"other/{number}.png")
    columns = {f"image_path_{number}": f"other/{number}.png" for number in (1, 2)}
    assert layered(**write(row(**columns))) == ({"data/cat": ["1.png", "2.png"]}, [])
    both = {"image_path_0": "other/0.png", "caption": "x", **columns}
    assert layered(**write(both)) == ({"other/0": ["1.png", "2.png"]}, [])
    (line,) = layered(**write(row(image_path_1=3)))[1]
    assert "line 1: has image_path_1: 3, which is no path; correct the row" in line
    (line,) = layered(**write(row(image_path_1="other/9.png")))[1]
    assert "line 1: ./other/9.png: does not exist" in line
