"""Dataset files of musubi-tuner and sd-scripts as configurations of ours: what changes, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import world
import yaml
from latentmake.config import parse
from latentmake.errors import ConfigError, UserError
from latentmake.exchange.datasets_toml.importing import Imported, import_file, made_of
from latentmake.exchange.datasets_toml.order import ImportOrder, imported_run, plan_import
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from safetensors.numpy import save_file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for stem in ("a", "b"):
        world.draw(tmp_path / f"images/{stem}.png", 0, (64, 64))
        (tmp_path / f"images/{stem}.txt").write_text(f"caption of {stem}")


def order(text: str, name: str = "dataset.toml", **more: str) -> ImportOrder:
    Path(name).write_text(text, encoding="utf-8")
    return ImportOrder(run="cats", dataset_toml=name, **more)


def made(text: str, **more: str) -> Imported:
    """Import a file; what is printed loads, and is what was checked."""
    found = made_of(order(text, **more))
    assert yaml.safe_load(found.text) == found.values
    assert parse(found.values)
    return found


def notes(found: Imported) -> dict[str, str]:
    return {note.key: f"{note.what}; {note.hint}" for note in found.notes}


def one(values: dict[str, Any], section: str) -> dict[str, Any]:
    (found,) = values[section].values()
    assert isinstance(found, dict)
    return found


def one_name(values: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the one dataset and the one model."""
    (dataset,), (model,) = values["datasets"], values["models"]
    return dataset, model


MUSUBI = """
[general]
caption_extension = ".txt"
resolution = [64, 96]
[[datasets]]
image_directory = "images"
"""
SDSCRIPTS = """
[general]
caption_extension = ".txt"
[[datasets]]
resolution = 512
[[datasets.subsets]]
image_dir = "images"
"""


# -- musubi-tuner ---------------------------------------------------------------------------------


def test_defaults_of_musubi_tuner_are_written_where_ours_differ() -> None:
    found = made('[[datasets]]\nimage_directory = "images"\n')
    assert one(found.values, "datasets") == {
        "path": "images",
        "caption_extension": ".txt",
        "fit": "crop",
    }
    assert one(found.values, "runs")["resolutions"] == [[960, 544]]
    assert {"datasets[0].caption_extension", "datasets[0].resolution"} <= notes(found).keys()


def test_blocks_of_one_folder_are_one_dataset_at_several_resolutions() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\n'
    found = made(f"{MUSUBI}{block}resolution = 128\n")
    assert list(found.values["datasets"]) == ["images"]
    assert one(found.values, "runs")["resolutions"] == [[64, 96], 128]


def test_blocks_of_one_folder_with_other_settings_are_datasets_of_their_own() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\nnum_repeats = 3\n'
    found = made(f"{MUSUBI}{block}")
    assert list(found.values["datasets"]) == ["images", "images_2"]
    assert one(found.values, "runs")["datasets"] == ["images", "images_2"]


def test_datasets_of_other_resolutions_are_runs_of_their_own() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\nnum_repeats = 3\nresolution = 128\n'
    found = made(f"{MUSUBI}{block}")
    runs = found.values["runs"]
    assert {name: run["resolutions"] for name, run in runs.items()} == {
        "cats": [[64, 96]],
        "cats_2": [128],
    }
    assert "not together" in notes(found)["resolution"]


def test_the_smallest_batch_size_counts() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\nresolution = 128\nbatch_size = 4\n'
    found = made(f"{MUSUBI}batch_size = 2{block}")
    assert one(found.values, "runs")["trainer"] == {"kind": "musubi", "batch_size": 2}
    assert "2 or 4" in notes(found)["batch_size"]


def test_names_of_old_versions_and_unknown_keys_are_told_apart() -> None:
    found = made(f"{MUSUBI}qwen_image_edit_no_resize_control = false\nnum_repeat = 3\n")
    assert "datasets[0].num_repeat" in notes(found)
    assert "num_repeats" not in one(found.values, "datasets")
    assert not any("no_resize" in key for key in notes(found))


def test_what_ours_would_take_besides_is_set_or_told() -> None:
    world.draw(Path("images/sub/c.png"), 0, (64, 64))
    Path("images/sub/c.txt").write_text("deep")
    world.draw(Path("images/lonely.png"), 0, (64, 64))
    Path("images/readme.txt").write_text("of no image")
    world.draw(Path("images/odd.tiff"), 0, (64, 64))
    Path("images/b.txt").write_text(" \n")
    found = made(MUSUBI)
    dataset = one(found.values, "datasets")
    assert (dataset["flat"], dataset["on_error"], dataset["empty_caption"]) == (
        True,
        "skip",
        "allow",
    )
    lines = " ".join(note.line for note in found.notes)
    assert all(name in lines for name in ("lonely.png", "readme.txt", "odd.tiff"))


def test_clips_are_always_in_buckets_and_lengths_are_rounded() -> None:
    text = '[[datasets]]\nvideo_directory = "videos"\nresolution = 64\ncaption_extension = ".txt"\n'
    found = made(f"{text}target_frames = [8, 5, 1]\nsource_fps = 30.0\nframe_stride = 1\n")
    dataset = one(found.values, "datasets")
    assert (dataset["target_frames"], dataset["source_fps"]) == ([1, 5], 30.0)
    assert "fit" not in dataset
    assert {"datasets[0].target_frames", "datasets[0].enable_bucket", "paths"} <= {*notes(found)}


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_a_list_is_written_anew_where_ours_is_read_otherwise(absolute: bool) -> None:
    folder = f"{Path.cwd()}/images" if absolute else "images"
    rows = [{"image_path": f"{folder}/{stem}.png", "caption": stem} for stem in "ab"]
    Path("lists").mkdir()
    Path("lists/all.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = '[[datasets]]\nimage_jsonl_file = "lists/all.jsonl"\nresolution = 64\n'
    found = made(text)
    dataset = one(found.values, "datasets")
    assert dataset["flat"] is True
    assert dataset["path"] == ("lists/all.jsonl" if absolute else "runs/cats/all.jsonl")
    if not absolute:
        (data,) = found.written.values()
        written = [json.loads(line) for line in data.decode().splitlines()]
        assert [row["image_path"] for row in written] == [
            f"{Path.cwd()}/images/{stem}.png" for stem in "ab"
        ]


def test_caches_tell_architecture_task_and_dtype() -> None:
    import numpy as np

    Path("caches").mkdir()
    tensors = {
        "latents_1x8x8_float16": np.ones((16, 1, 8, 8), np.float16),
        "latents_image_1x8x8_float16": np.ones((20, 1, 8, 8), np.float16),
    }
    save_file(tensors, "caches/a_0064x0064_wan.safetensors")
    found = made(f'{MUSUBI}cache_directory = "caches"\n')
    model = one(found.values, "models")
    assert (model["task"], model["vae_dtype"]) == ("i2v-A14B", "float16")
    assert one(found.values, "datasets")["adopt_from"] == ["caches"]
    save_file(tensors, "caches/a_0064x0064_qi.safetensors")
    Path("caches/a_0064x0064_wan.safetensors").unlink()
    found = made(f'{MUSUBI}cache_directory = "caches"\n')
    assert one(found.values, "models")["architecture"] == "qwen_image"


@pytest.mark.parametrize("name", ["z_image", "hunyuan_video", "qwen_image", "krea2", "wan"])
def test_a_named_architecture_counts(name: str) -> None:
    found = made(MUSUBI, architecture=name)
    assert list(found.values["models"]) == [name]
    assert not any(key == "models" and "usual" in text for key, text in notes(found).items())


def test_dollars_and_tildes_are_no_variables() -> None:
    Path("~$HOME").mkdir()
    found = made(MUSUBI.replace('"images"', '"~$HOME"'))
    (dataset,) = parse(found.values).datasets.values()
    assert dataset.path == "./~$HOME"


def test_a_resolution_that_is_no_multiple_has_the_same_buckets_or_is_told() -> None:
    found = made(MUSUBI.replace("[64, 96]", "1000") + "enable_bucket = true\n")
    assert "very same buckets" in notes(found)["datasets[0].resolution"]
    found = made(MUSUBI.replace("[64, 96]", "100"))
    assert one(found.values, "runs")["resolutions"] == [96]
    assert "other sizes" in notes(found)["datasets[0].resolution"]


# -- sd-scripts -----------------------------------------------------------------------------------


def test_defaults_of_sdscripts_are_written_where_ours_differ() -> None:
    found = made(SDSCRIPTS.replace("[general]", "[general]\nenable_bucket = true"))
    assert one(found.values, "datasets") == {
        "path": "images",
        "caption_extension": ".txt",
        "fit": "bucket",
        "bucket_reso_steps": 64,
    }


def test_keys_of_captions_are_inherited_and_overridden() -> None:
    text = SDSCRIPTS.replace("[general]", "[general]\nshuffle_caption = true\nkeep_tokens = 1")
    found = made(f'{text}keep_tokens = 3\ncaption_prefix = "art"\n')
    assert one(found.values, "datasets")["captions"] == {
        "variants": 4,
        "shuffle_caption": True,
        "keep_tokens": 3,
        "caption_prefix": "art",
    }


def test_class_tokens_are_the_caption_of_images_without_one() -> None:
    found = made(f'{SDSCRIPTS}class_tokens = "a cat"\n')
    assert "captions" not in one(found.values, "datasets")
    Path("images/b.txt").unlink()
    found = made(f'{SDSCRIPTS}class_tokens = "a cat"\n')
    place = one(found.values, "datasets")["metadata_file"]
    assert json.loads(found.written[place]) == {"b.png": {"caption": "a cat"}}
    Path("images/a.txt").unlink()
    found = made(f'{SDSCRIPTS}class_tokens = "a cat"\n')
    dataset = one(found.values, "datasets")
    assert (dataset["missing_caption"], dataset["captions"]) == (
        "empty",
        {"replacements": {"": "a cat"}},
    )


@pytest.mark.parametrize("others", [["images/b.png"], ["other/c.png", "images/b.png"]])
def test_metadata_may_name_the_images_of_a_relative_folder_by_absolute_paths(
    others: list[str],
) -> None:
    world.draw(Path("other/c.png"), 0, (64, 64))
    places = ("images/a.png", *others)
    rows = {str(Path(place).absolute()): {"caption": "a cat"} for place in places}
    Path("meta.json").write_text(json.dumps(rows), encoding="utf-8")
    found = made(f'{SDSCRIPTS}metadata_file = "meta.json"\n')
    dataset = one(found.values, "datasets")
    assert dataset["path"] == ("images" if len(others) == 1 else str(Path().absolute()))
    assert "on_error" not in dataset
    listed, faults = Facts(parse(found.values), Memo(None)).items(*one_name(found.values))
    assert not faults and len(listed) == len(rows)


def test_metadata_of_several_folders_tells_which_entries_a_build_does_not_find() -> None:
    world.draw(Path("other/c.png"), 0, (64, 64))
    rows = {"a.png": {"caption": "x"}, str(Path("other/c.png").absolute()): {"caption": "y"}}
    Path("meta.json").write_text(json.dumps(rows), encoding="utf-8")
    found = made(f'{SDSCRIPTS}metadata_file = "meta.json"\n')
    assert any("1 entries of meta.json name no image" in note for note in notes(found).values())


def test_regularisation_images_are_repeated_up_to_the_others() -> None:
    world.draw(Path("regular/one.png"), 0, (64, 64))
    text = f'{SDSCRIPTS}num_repeats = 3\n[[datasets.subsets]]\nimage_dir = "regular"\n'
    found = made(f"{text}is_reg = true\n")
    assert found.values["datasets"]["regular"]["num_repeats"] == 6
    assert any(key.endswith("is_reg") for key in notes(found))


def test_a_missing_resolution_is_that_of_the_command_line() -> None:
    found = made(SDSCRIPTS.replace("resolution = 512", ""))
    assert one(found.values, "runs")["resolutions"] == [1024]
    found = made(SDSCRIPTS.replace("resolution = 512", ""), architecture="sd1")
    assert one(found.values, "runs")["resolutions"] == [512]


def test_what_cannot_be_cached_is_told_where_it_is_asked_for() -> None:
    found = made(f"{SDSCRIPTS}color_aug = true\nrandom_crop = false\ncache_info = true\n")
    told = {key.rpartition(".")[2] for key in notes(found)}
    assert "color_aug" in told
    assert not told & {"random_crop", "cache_info"}


# -- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "no TOML": ("[[datasets]\n", ["dataset.toml", "is not TOML", "line 1"]),
    "no datasets": ("[general]\n", ["names no dataset"]),
    "another type": (
        MUSUBI + 'num_repeats = "two"\n',
        ["dataset.toml: datasets[0].num_repeats", "integer"],
    ),
    "a list in place of tables": ("datasets = [1]\n", ["datasets", "[[datasets]]"]),
    "one side in a list": (MUSUBI + "resolution = [64]\n", ["resolution", "[960, 544]"]),
    "sides as text": (
        '[[datasets]]\nimage_directory = "images"\nresolution = "64x64"\n',
        ["datasets[0].resolution: should be a number, or a width and a height"],
    ),
    "a mistake in [general]": (
        '[general]\nbatch_size = 0\n[[datasets]]\nimage_directory = "images"\n',
        ["dataset.toml: general.batch_size"],
    ),
    "a mistake in [general] of sd-scripts": (
        SDSCRIPTS.replace("[general]", "[general]\nbatch_size = 0"),
        ["dataset.toml: general.batch_size"],
    ),
    "no table of general keys": (
        f'general = "x"\n{MUSUBI.replace("[general]", "[other]")}',
        ["dataset.toml: general: is no table"],
    ),
    "ControlNet": (SDSCRIPTS + 'conditioning_data_dir = "x"\n', ["ControlNet"]),
    "another extraction": (
        '[[datasets]]\nvideo_directory = "v"\nframe_extraction = "tail"\n',
        ["frame_extraction", "'head'"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str) -> None:
    text, words = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        made_of(order(text))
    line = str(caught.value)
    assert "\n" not in line and "; " in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("file", "data", "word"),
    [
        ("a.json", b"{", "is not JSON"),
        ("a.json", b"[]", "no [[datasets]]"),
        ("a.toml", b"a = '\xff'", "is not UTF-8 (line 1)"),
        ("a.yaml", b"", "neither"),
        ("a.toml", None, "does not exist"),
    ],
)
def test_a_file_that_is_none_is_one_line(file: str, data: bytes | None, word: str) -> None:
    if data is not None:
        Path(file).write_bytes(data)
    with pytest.raises(ConfigError, match=r"\A[^\n]+\Z") as caught:
        plan_import("cats", {"dataset_toml": file})
    assert word in str(caught.value)


def test_an_architecture_of_the_other_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sdxl is no architecture of musubi-tuner.*wan, "):
        made_of(order(MUSUBI, architecture="sdxl"))
    with pytest.raises(ConfigError, match=r"did you mean qwen_image_edit\?"):
        made_of(order(MUSUBI, architecture="Qwen-Image-Edit"))
    with pytest.raises(ConfigError, match=r"wan is no architecture of sd-scripts.*sdxl, "):
        made_of(order(SDSCRIPTS, architecture="wan"))


def test_a_dataset_that_does_not_fit_the_architecture_is_one_line() -> None:
    text = MUSUBI.replace("[64, 96]", "16") + "enable_bucket = true\n"
    with pytest.raises(ConfigError, match=r"does not fit z_image: [^\n]+architecture=NAME"):
        made_of(order(text, architecture="z_image"))


# -- the command ----------------------------------------------------------------------------------


def test_an_import_stands_alone() -> None:
    assert imported_run(["train_cats"]) is None
    assert imported_run(["import_cats"]) == "cats"
    with pytest.raises(ConfigError, match="cannot be given together with train_cats"):
        imported_run(["import_cats", "train_cats"])
    with pytest.raises(ConfigError, match="no name of a run"):
        imported_run(["import_../x"])
    with pytest.raises(ConfigError, match="--config dataset_toml="):
        plan_import("cats", {})


def test_what_an_import_wrote_is_replaced_and_what_was_edited_is_not() -> None:
    asked, said = order(MUSUBI), list[str]()
    import_file(asked, said.append)
    path = Path("runs/cats/import.yaml")
    before = path.stat().st_mtime_ns
    import_file(asked, said.append)
    assert path.stat().st_mtime_ns == before
    import_file(order(MUSUBI + "num_repeats = 2\n"), said.append)
    assert "num_repeats: 2" in path.read_text()
    path.write_text(path.read_text().replace("num_repeats: 2", "num_repeats: 7"))
    with pytest.raises(ConfigError, match="may have been edited"):
        import_file(asked, said.append)
    assert "num_repeats: 7" in path.read_text()
