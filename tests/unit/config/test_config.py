"""What a configuration takes: each spelling of a value, places, and sizes that fit the VAE."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from config_world import changed, smallest
from latentmake.base.errors import ConfigError
from latentmake.config.datasets import Dataset
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.models.inspection import check_run


@pytest.mark.parametrize(
    ("line", "key", "written", "value"),
    [
        ("learning_rate: 1e-3", "learning_rate", "1e-3", 0.001),
        ("mixed_precision: no", "mixed_precision", False, "no"),
    ],
)
def test_what_yaml_takes_for_text_or_a_truth_is_a_number_or_a_word_here(
    line: str, key: str, written: object, value: object
) -> None:
    values = smallest()
    values["runs"]["first"]["trainer"] |= yaml.safe_load(line)
    assert values["runs"]["first"]["trainer"][key] == written
    assert getattr(parse(values).runs["first"].trainer, key) == value


@pytest.mark.parametrize(
    ("written", "name"),
    [(64, "64"), ("64", "64"), ([64, 64], "64"), ([512, 768], "512x768"), ("512x768", "512x768")],
)
def test_a_resolution_has_one_name_in_every_spelling(written: Any, name: str) -> None:
    config = parse(changed("runs", "first", "resolutions", value=[written]))
    assert [each.name for each in config.runs["first"].resolutions] == [name]


def test_one_value_stands_for_a_list_of_one_and_a_path_for_its_section() -> None:
    values = smallest()
    values["runs"]["first"] |= {"datasets": "cats", "resolutions": 64}
    values["models"]["tiny"] |= {"text": "text_encoder", "vae": {"path": "vae"}}
    assert parse(values) == parse(smallest())


def test_variables_and_home_in_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MODELS", "/big/models")
    values = changed("datasets", "cats", "path", value="~/cats")
    values["models"]["tiny"] |= {"vae": "$MODELS/vae", "unet": {"path": "${MODELS}/a$$b"}}
    values["musubi_tuner"] = {"path": "tuner", "venv": "~/venv"}
    found = parse(values)
    assert found.datasets["cats"].path == "/home/me/cats"
    model = found.models["tiny"]
    assert model.unet and (model.vae.path, model.unet.path) == (
        *("/big/models/vae", "/big/models/a$b"),
    )
    assert found.musubi_tuner and found.musubi_tuner.venv == "/home/me/venv"
    monkeypatch.delenv("MODELS")
    with pytest.raises(ConfigError, match=r"^models\.tiny\.vae\.path: .*MODELS.*not set"):
        parse(values)


@pytest.mark.parametrize(
    ("steps", "resolution", "line"),
    [
        (None, 65, r"runs\.first\.resolutions: 65 pixels .*; use 64 or 72"),
        (None, [64, 4], r"runs\.first\.resolutions: 4 pixels .*; use 8"),
        (12, 64, r"datasets\.cats\.bucket_reso_steps: 12 .*; use a multiple of 8"),
    ],
)
def test_sizes_that_the_vae_cannot_have_are_refused(
    steps: int | None, resolution: Any, line: str
) -> None:
    values = changed("runs", "first", "resolutions", value=[resolution])
    if steps is not None:
        values["datasets"]["cats"] |= {"fit": "bucket", "bucket_reso_steps": steps}
    config = parse(values)
    with pytest.raises(ConfigError, match=f"^{line}"):
        check_run(config, "first", config.runs["first"], Memo(None).remembered)


def test_clips_that_only_our_encoders_make_are_known_by_their_keys() -> None:
    own = {"path": "l.jsonl", "fit": "crop", "sample_stride": 2}
    own |= {"source_fps": "auto", "display_rotation": True}
    film = {"path": "data/films", "target_frames": [5]}
    assert Dataset.model_validate(film).own_clips == []
    for key, value in own.items():
        assert Dataset.model_validate(film | {key: value}).own_clips == [key]
