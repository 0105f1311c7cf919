"""Keys of datasets of videos and of lists: what cannot be made is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.base.errors import ConfigError
from latentmake.config.datasets import Dataset
from latentmake.config.root import Config, parse

VIDEOS: dict[str, Any] = {"path": "data/films", "target_frames": [5]}


def values(model: dict[str, Any] | None = None, **dataset: Any) -> dict[str, Any]:
    wan = {"task": "t2v-1.3B", "vae": "vae.pth", "text": {"path": "t5.pth", "tokenizer": "t"}}
    return {
        "datasets": {"films": dataset},
        "models": {"wan": {**wan, **(model or {})}},
        "runs": {"first": {"datasets": "films", "model": "wan", "resolutions": [[480, 832]]}},
        "musubi_tuner": {"path": "musubi-tuner"},
    }


def line(asked: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OWN = {
    "path": "data/films.jsonl",
    "fit": "crop",
    "sample_stride": 2,
    "source_fps": "auto",
    "display_rotation": True,
}


@pytest.mark.parametrize("key", OWN)
def test_clips_of_our_own_are_made_by_our_encoders_alone(key: str) -> None:
    asked = {**VIDEOS, key: OWN[key]}
    assert isinstance(parse(values(**asked)), Config)
    assert Dataset.model_validate(asked).own_clips == [key]
    if key != "path":  # a list without parts of videos is given to the scripts
        said = line(values({"encoder": "musubi"}, **asked))
        assert said.startswith(f"datasets.films.{key}: ") and "leave out `encoder`" in said
    assert Dataset.model_validate(VIDEOS).own_clips == []
    assert isinstance(parse(values({"encoder": "musubi"}, **VIDEOS)), Config)


@pytest.mark.parametrize("key", ["sample_stride", "source_fps", "display_rotation"])
def test_what_is_about_videos_needs_target_frames(key: str) -> None:
    assert f"`{key}` is about videos" in line(values(path="data", **{key: OWN[key]}))


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"path": "s3://bucket/list.jsonl"}, "read from a disk"),
        ({"path": "list.json", "metadata_file": "m.json"}, "`metadata_file` is not for a list"),
        ({**VIDEOS, "source_fps": "fast"}, 'source_fps: "fast" should be a number of frames'),
        ({**VIDEOS, "source_fps": 0}, "source_fps: 0 should be a number of frames"),
        ({**VIDEOS, "source_fps": float("nan")}, "or auto"),
        ({**VIDEOS, "source_fps": 10**400}, "or auto"),
        ({**VIDEOS, "sample_stride": 0}, "sample_stride"),
        ({**VIDEOS, "bucket_no_upscale": True}, "bucket_no_upscale"),
    ],
)
def test_what_cannot_be_is_refused(dataset: dict[str, Any], words: str) -> None:
    said = line(values(**dataset))
    assert said.startswith("datasets.films") and words in said


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("runs.first", {"resolutions": [500]}, ["resolutions: 500 ", "use 496 or 512"]),
        ("models.wan", {"task": "i2v-14B"}, ["i2v-14B needs `clip`"]),
        ("musubi_tuner", None, ["this key is missing", "set musubi_tuner.path"]),
    ],
)
def test_what_a_model_of_wan_cannot_do_without_is_named(
    section: str, changes: dict[str, Any] | None, words: list[str]
) -> None:
    asked = values({"dit": "dit"}, path="data")
    asked["runs"]["first"]["trainer"] = {"kind": "musubi"}
    name, _, below = section.partition(".")
    if changes is None:
        del asked[name]
    else:
        asked[name][below] |= changes
    said = line(asked)
    assert said.startswith(section) and all(word in said for word in words)


def test_sd_scripts_reads_no_list() -> None:
    asked = values(path="data/list.jsonl")
    asked["models"]["wan"] = {
        "vae": "vae",
        "text": ["one", "two"],
        "architecture": "sdxl",
        "layout": "sdscripts",
    }
    asked["runs"]["first"]["resolutions"] = 512
    assert line(asked).startswith("datasets.films.path: sd-scripts reads folders")
