"""Captioners in a configuration: their names, their keys, and the datasets that use them."""

from __future__ import annotations

from typing import Any

import pytest
from config_world import smallest
from latentmake.base.errors import ConfigError
from latentmake.config.captioners import Captioner
from latentmake.config.fields import shaping
from latentmake.config.root import Config, parse
from refusals import refused


def config(names: object = "florence", **captioners: Any) -> Config:
    values = smallest()
    values["datasets"]["cats"]["captioner"] = names
    return parse(values | {"captioners": captioners or {"florence": {"model": "models/f"}}})


def line(names: object = "florence", **captioners: Any) -> str:
    return refused(lambda: config(names, **captioners), kind=ConfigError)


def test_a_dataset_names_one_captioner_or_several() -> None:
    assert parse(smallest()).datasets["cats"].captioner == {}
    assert [*config().datasets["cats"].captioner] == ["florence"]
    both = config(["wd", "florence"], wd={"model": "w"}, florence={"model": "f"})
    assert [*both.datasets["cats"].captioner] == ["wd", "florence"]
    assert both.datasets["cats"].captioners == {
        name: both.captioners[name] for name in ("wd", "florence")
    }


def test_a_name_that_does_not_exist_or_stands_twice_is_refused() -> None:
    assert "there is no captioner `florense`" in line("florense")
    assert "did you mean `florence`?" in line("florense")
    assert "`florence` is named twice" in line(["florence", "florence"])


@pytest.mark.parametrize(
    "name", ["text", "texts", "text.1", "64", "64b", "480x832", "latents", "a/b", ".a"]
)
def test_a_name_that_is_no_folder_of_captions_is_refused(name: str) -> None:
    assert name in line(name, **{name: {"model": "m"}})


def test_a_model_leaves_the_folder_of_captions_to_them() -> None:
    values = smallest()
    values["models"] = {"captions": next(iter(values["models"].values()))}
    values["runs"] = {"cats": {"datasets": "cats", "model": "captions", "resolutions": 64}}
    with pytest.raises(ConfigError, match=r"models\.captions: made captions have the folder"):
        parse(values)


@pytest.mark.parametrize("name", ["florence", "x64", "a-text", "qwen2.5-vl"])
def test_other_names_are_taken(name: str) -> None:
    assert config(name, **{name: {"model": "m"}}).captioners[name].model.path == "m"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "florence.model: this key is missing"),
        ({"model": "m", "promt": "x"}, "did you mean `prompt`?"),
        ({"model": "m", "quantization": "2bit"}, "quantization"),
        ({"model": "m", "quantization": 8}, "quantization"),
        ({"model": "m", "temperature": -1}, "temperature"),
        ({"model": "m", "thresholds": {"general": 2}}, "thresholds.general"),
        ({"model": "m", "thresholds": {"genral": 0.2}}, "did you mean `general`?"),
        ({"model": "m", "drop": "the image shows"}, "write it as a list"),
        ({"model": "m", "replace": {"": "a"}}, "replace"),
        ({"model": {"hub": "a/b"}}, "needs a commit"),
    ],
)
def test_a_mistake_is_one_line(keys: dict[str, Any], words: str) -> None:
    assert words in line(florence=keys)


def test_one_threshold_keeps_the_others() -> None:
    settings = Captioner.model_validate({"model": "m", "thresholds": {"general": 0.5}})
    assert settings.thresholds.model_dump() == {"general": 0.5, "character": 0.85, "rating": None}


def test_only_post_processing_does_not_shape_the_made_caption() -> None:
    settings = Captioner.model_validate({"model": "m"})
    post = {"trigger", "prefix", "replace", "drop", "max_words"}
    assert set(shaping(settings, "text")) == post
    sections = {"model", "thresholds"}
    made = set(shaping(settings, "captions"))
    assert made == set(Captioner.model_fields) - post - sections
