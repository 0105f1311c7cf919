"""Dataset files of musubi-tuner and sd-scripts as configurations of ours: what changes, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import world
import yaml
from latentmake.base.errors import ConfigError, UserError
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.trainers.exchange.datasets_toml import Imported, imported
from refusals import refused


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for stem in ("a", "b"):
        world.draw(tmp_path / f"images/{stem}.png", 0, (64, 64))
        (tmp_path / f"images/{stem}.txt").write_text(f"caption of {stem}")


def made(text: str, **more: str) -> Imported:
    """Import a file; what is printed loads, and is what was checked."""
    Path("dataset.toml").write_text(text, encoding="utf-8")
    found = imported(Path("dataset.toml"), "cats", **more)
    assert yaml.safe_load(found.text) == found.values
    assert all(f"# - {note}\n" in found.text for note in found.notes)
    assert parse(found.values)
    return found


def noted(found: Imported, *words: str) -> bool:
    """Whether one note has all these words."""
    return any(all(word in note for word in words) for note in found.notes)


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
        "flat": True,
        "empty_caption": "allow",
        "caption_extension": ".txt",
        "on_error": "skip",
        "fit": "crop",
    }
    assert one(found.values, "runs")["resolutions"] == [[960, 544]]


def test_blocks_of_one_folder_are_one_dataset_at_several_resolutions() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\n'
    found = made(f"{MUSUBI}{block}resolution = 128\n")
    assert list(found.values["datasets"]) == ["images"]
    assert one(found.values, "runs")["resolutions"] == [[64, 96], 128]
    assert not noted(found, "num_repeats")
    twice = made(f"{MUSUBI}{block}resolution = 128{block}resolution = 128\n")
    assert twice.values == found.values
    assert noted(twice, "num_repeats: images has several blocks of one resolution")


def test_datasets_of_other_resolutions_are_runs_of_their_own_with_the_smallest_batch_size() -> None:
    block = '\n[[datasets]]\nimage_directory = "images"\nnum_repeats = 3\nresolution = 128\n'
    found = made(f"{MUSUBI}{block}")
    runs = found.values["runs"]
    sizes = {name: run["resolutions"] for name, run in runs.items()}
    assert sizes == {"cats": [[64, 96]], "cats_2": [128]}
    assert noted(found, "resolution: ", "cats, cats_2", "train one after the other")
    block = block.replace("num_repeats = 3", "batch_size = 4")
    found = made(f"{MUSUBI}batch_size = 2{block}")
    assert one(found.values, "runs")["trainer"] == {"kind": "musubi", "batch_size": 2}
    assert noted(found, "batch_size: ", "the smallest of [2, 4]")


def test_clips_are_always_in_buckets_and_lengths_are_rounded() -> None:
    text = '[[datasets]]\nvideo_directory = "videos"\nresolution = 64\ncaption_extension = ".txt"\n'
    found = made(f"{text}target_frames = [8, 5, 1]\nsource_fps = 30.0\nframe_stride = 1\n")
    dataset = one(found.values, "datasets")
    assert (dataset["target_frames"], dataset["source_fps"]) == ([1, 5], 30.0)
    assert "fit" not in dataset


def test_a_list_is_read_as_it_is() -> None:
    row = {"image_path": f"{Path.cwd()}/images/a.png", "caption": "a"}
    Path("all.jsonl").write_text(json.dumps(row))
    found = made('[[datasets]]\nimage_jsonl_file = "all.jsonl"\nresolution = 64\n')
    dataset = one(found.values, "datasets")
    assert (dataset["path"], dataset["flat"]) == ("all.jsonl", True)
    assert noted(found, "all.jsonl", "relative paths")
    items, faults = Facts(parse(found.values), Memo(None)).items(*one_name(found.values))
    assert [item.texts for item in items] == [["a"]] and not faults


def test_unknown_keys_and_blocks_without_a_source_are_told() -> None:
    found = made(f"{MUSUBI}num_repeat = 3\n[[datasets]]\nbatch_size = 1\n")
    assert noted(found, "left out", "num_repeat")
    assert "num_repeats" not in one(found.values, "datasets")
    assert noted(found, "datasets[1]: left out, it names no images or videos")


def test_caches_tell_the_architecture() -> None:
    Path("caches").mkdir()
    Path("caches/a_0064x0064_qi.safetensors").touch()
    found = made(f'{MUSUBI}cache_directory = "caches"\n')
    assert one(found.values, "models")["architecture"] == "qwen_image"
    assert one(found.values, "datasets")["adopt_from"] == ["caches"]
    assert noted(found, "the architecture is qwen_image, as the caches in caches are")


@pytest.mark.parametrize("name", ["z_image", "hunyuan_video", "qwen_image", "krea2", "wan"])
def test_a_named_architecture_counts(name: str) -> None:
    found = made(MUSUBI, architecture=name)
    assert list(found.values["models"]) == [name]
    assert not noted(found, "the usual one")


def test_dollars_and_tildes_are_no_variables() -> None:
    Path("~$HOME").mkdir()
    found = made(MUSUBI.replace('"images"', '"~$HOME"'))
    (dataset,) = parse(found.values).datasets.values()
    assert dataset.path == "./~$HOME"


def test_a_resolution_that_is_no_multiple_is_rounded_and_told() -> None:
    found = made(MUSUBI.replace("[64, 96]", "100"))
    assert one(found.values, "runs")["resolutions"] == [96]
    assert noted(found, "96 x 96 in place of 100 x 100", "other sizes")


# -- sd-scripts -----------------------------------------------------------------------------------


def test_defaults_of_sdscripts_are_written_where_ours_differ() -> None:
    found = made(SDSCRIPTS.replace("[general]", "[general]\nenable_bucket = true"))
    assert one(found.values, "datasets") == {
        "path": "images",
        "flat": True,
        "caption_extension": ".txt",
        "missing_caption": "empty",
        "fit": "bucket",
        "bucket_reso_steps": 64,
    }


def test_class_tokens_are_the_caption_of_images_without_one() -> None:
    found = made(f'{SDSCRIPTS}class_tokens = "a cat"\n')
    assert one(found.values, "datasets")["class_tokens"] == "a cat"
    assert "missing_caption" not in one(found.values, "datasets")
    Path("images/b.txt").unlink()
    items, faults = Facts(parse(found.values), Memo(None)).items(*one_name(found.values))
    assert [item.texts for item in items] == [None, ["a cat"]] and not faults


def test_keys_of_captions_are_inherited_and_what_differs_is_told() -> None:
    text = SDSCRIPTS.replace("[general]", "[general]\nshuffle_caption = true\nkeep_tokens = 1")
    found = made(
        f'{text}keep_tokens = 3\ncaption_prefix = "art"\ncache_info = true\ncolor_aug = false\n'
    )
    assert one(found.values, "datasets")["captions"] == {
        "variants": 4,
        "shuffle_caption": True,
        "keep_tokens": 3,
        "caption_prefix": "art",
    }
    assert noted(found, "left out", "cache_info")
    assert noted(found, "4 texts that are drawn once", "4 times as long")
    assert not noted(found, "color_aug")


def test_subsets_without_a_source_and_second_ones_are_told() -> None:
    Path("meta.json").write_text("{}")
    subset = "[[datasets.subsets]]\nnum_repeats = 2\n"
    again = '[[datasets.subsets]]\nmetadata_file = "meta.json"\n'
    found = made(f'{SDSCRIPTS}metadata_file = "meta.json"\n{subset}{again}')
    assert noted(found, "datasets[0].subsets[1]: left out, it names no image_dir")
    assert noted(found, "datasets[0].subsets[2]: left out, an earlier one is the same")


REGULAR = """
[[datasets.subsets]]
image_dir = "man"
is_reg = true
num_repeats = 2
"""


def test_regularisation_images_are_taken_over_with_their_repeats() -> None:
    found = made(SDSCRIPTS + REGULAR)
    datasets = found.values["datasets"]
    assert [datasets[name].get("is_reg", False) for name in ("images", "man")] == [False, True]
    assert datasets["man"]["num_repeats"] == 2
    assert one(found.values, "runs")["datasets"] == ["images", "man"]
    assert noted(found, "is_reg", "`prior_loss_weight`") and not noted(found, "left out")


def test_regularisation_images_train_beside_images_of_their_block_as_there() -> None:
    larger = SDSCRIPTS.partition("[[datasets]]")[2].replace("512", "768")
    found = made(f"{SDSCRIPTS}{REGULAR}[[datasets]]{larger}")
    run = one(found.values, "runs")
    assert (run["datasets"], run["resolutions"]) == (["images", "man"], [512, 768])
    assert noted(found, "the regularisation images man at all of its own")
    assert noted(found, "the run cats balances them over its datasets of the same buckets")
    alone = f"[[datasets]]\nresolution = 256\n{REGULAR}"
    found = made(SDSCRIPTS + alone)
    assert [*found.values["datasets"]] == ["images"]
    assert noted(found, "datasets[1]: left out", "beside others of their block only")
    with pytest.raises(UserError, match=r"taken over: datasets\[0\]: left out, sd-scripts shows"):
        made(alone)
    with pytest.raises(UserError, match=r"subsets\[1\]\.is_reg: cannot be read"):
        made(SDSCRIPTS + REGULAR.replace("true", '"yes"'))


@pytest.mark.parametrize(("architecture", "side"), [({}, 1024), ({"architecture": "sd1"}, 512)])
def test_a_missing_resolution_is_that_of_the_command_line(
    architecture: dict[str, str], side: int
) -> None:
    found = made(SDSCRIPTS.replace("resolution = 512", ""), **architecture)
    assert one(found.values, "runs")["resolutions"] == [side]


def test_names_that_no_disk_can_have_are_taken_over_as_they_are() -> None:
    name = "x" * 300
    for text in (MUSUBI, SDSCRIPTS):
        found = made(text.replace('"images"', f'"{name}"'))
        assert one(found.values, "datasets")["path"] == name


# -- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "no TOML": ("[[datasets]\n", ["dataset.toml", "is not TOML", "line 1"]),
    "no datasets": ("[general]\n", ["names no dataset"]),
    "options of a training": (
        'resolution = "512,512"\nlearning_rate = 1e-4\n',
        [
            "dataset.toml: is no dataset file: it has no [[datasets]]; name the file",
            "--dataset_config",
        ],
    ),
    "options that name the file": (
        '[data]\nresolution = "512,512"\ndataset_config = "cats.toml"\n',
        ["dataset.toml: is no dataset file", "`latentmake import cats.toml`"],
    ),
    "options with a folder": ('train_data_dir = "img"\n', ["`latentmake init img`"]),
    "another type": (MUSUBI + 'num_repeats = "two"\n', ["dataset.toml", "num_repeats", "integer"]),
    "a list in place of tables": ("datasets = [1]\n", ["datasets", "[[datasets]]"]),
    "one side in a list": (MUSUBI + "resolution = [64]\n", ["resolution", "[960, 544]"]),
    "a number for a folder": (
        "[[datasets]]\nimage_directory = 1\n",
        ["datasets[0].image_directory: cannot be read", "a valid string"],
    ),
    "metadata alone": (SDSCRIPTS.replace("image_dir", "metadata_file"), ["add image_dir"]),
    "a date": (MUSUBI + "num_repeats = 2020-01-01\n", ["num_repeats: 2020-01-01 should be"]),
    "images of their own resolution": (
        f"{SDSCRIPTS}{REGULAR}resolution = 256\n",
        ["dataset.toml: the regularisation images man", "a resolution of their own"],
    ),
    "ControlNet": (SDSCRIPTS + 'conditioning_data_dir = "x"\n', ["ControlNet"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str) -> None:
    text, words = MISTAKES[name]
    line = refused(lambda: made(text))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("file", "data", "word"),
    [
        ("a.toml", b"a = '\xff'", "it is not UTF-8 (byte 6)"),
        ("a.yaml", b"", "is no .toml file"),
        ("a.toml", None, "cannot be read (No such file"),
    ],
)
def test_a_file_that_is_none_is_one_line(file: str, data: bytes | None, word: str) -> None:
    if data is not None:
        Path(file).write_bytes(data)
    assert word in refused(lambda: imported(Path(file), "cats"))


@pytest.mark.parametrize(
    ("text", "architecture", "line"),
    [
        (MUSUBI, "sdxl", r"sdxl is no architecture of musubi-tuner.*wan, "),
        (SDSCRIPTS, "wan", r"wan is no architecture of sd-scripts.*sdxl, "),
        (
            MUSUBI.replace("[64, 96]", "16") + "enable_bucket = true\n",
            "z_image",
            r"does not fit z_image: [^\n]+another --architecture",
        ),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused(
    text: str, architecture: str, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        made(text, architecture=architecture)
