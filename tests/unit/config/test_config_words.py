"""A word of another program is answered with the key to write here, true for the run's trainer."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.base.errors import ConfigError
from latentmake.config.fields import PATTERNS
from latentmake.config.mistakes import foreign_words, sections
from latentmake.config.root import Config, parse

TRAINERS: dict[str, dict[str, Any]] = {
    "sd": {"kind": "sd"},
    "wan": {"kind": "wan"},
    "musubi": {"kind": "musubi"},
    "sdscripts": {"kind": "sdscripts"},
}


def configuration(kind: str) -> dict[str, Any]:
    """Return the smallest configuration of a trainer."""
    model: dict[str, Any] = {"vae": "vae", "text": "text"}
    if kind == "sd":
        model |= {"unet": "unet"}
    elif kind in ("musubi", "wan"):
        model |= {"task": "t2v-1.3B", "dit": "dit.safetensors"}
    else:
        model |= {"layout": "sdscripts", "architecture": "sd1", "checkpoint": "sd.safetensors"}
    return {
        "datasets": {"cats": {"path": "data/cats"}},
        "models": {"m": model},
        "runs": {
            "r": {
                "datasets": ["cats"],
                "model": "m",
                "resolutions": [512],
                "trainer": dict(TRAINERS[kind]),
            }
        },
        "musubi_tuner": {"path": "../musubi-tuner"},
        "sd_scripts": {"path": "../sd-scripts"},
    }


def message(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLACES = {
    "top": (),
    "dataset": ("datasets", "cats"),
    "model": ("models", "m"),
    "run": ("runs", "r"),
    "trainer": ("runs", "r", "trainer"),
}


@pytest.mark.parametrize(
    ("kind", "place", "word", "expected"),
    [
        ("musubi", "model", "t5", "did you mean `text`?"),
        ("musubi", "dataset", "image_directory", "did you mean `path`?"),
        (
            "musubi",
            "dataset",
            "cache_directory",
            "leave it out: latents and text are always cached",
        ),
        ("sdscripts", "dataset", "enable_bucket", "write `fit: bucket`"),
        ("sd", "trainer", "enable_bucket", "write `fit: bucket` in datasets.NAME"),
        ("musubi", "dataset", "resolution", "write `resolutions` in runs.NAME"),
        ("musubi", "dataset", "batch_size", "`batch_size` belongs to runs.NAME.trainer"),
        ("sd", "trainer", "batch_size", "did you mean `train_batch_size`?"),
        ("musubi", "trainer", "max_steps", "did you mean `max_train_steps`?"),
        ("sd", "trainer", "max_train_steps", "did you mean `steps`?"),
        ("wan", "trainer", "discrete_flow_shift", "did you mean `flow_shift`?"),
        ("sd", "trainer", "save_steps", "did you mean `save_every_n_steps`?"),
        ("sd", "trainer", "use_snr", "did you mean `snr_gamma`?"),
        ("sdscripts", "trainer", "min_snr_gamma", "`arguments: [--min_snr_gamma, ...]`"),
        ("musubi", "trainer", "rank", "did you mean `network_dim`?"),
        ("sdscripts", "trainer", "unet_lr", "did you mean `learning_rate`?"),
        ("musubi", "trainer", "sage_attn", "leave it out: SageAttention has no backward pass"),
        ("sd", "trainer", "attention", "leave it out: torch chooses the fastest kernel"),
        ("sd", "trainer", "train_text_encoder", "leave it out: text encoders are not trained"),
        ("sd", "model", "pretrained_model_name_or_path", "name its parts in models.NAME"),
        ("sd", "top", "rank", "`rank` belongs to runs.NAME.trainer"),
        ("sd", "run", "exif_rotation", "`exif_rotation` belongs to datasets.NAME"),
        ("sd", "trainer", "guidance_scale", "belongs to runs.NAME.trainer.samples"),
        ("sdscripts", "top", "pretrained_model_name_or_path", "`dit` or `checkpoint`"),
        ("sd", "dataset", "instance_prompt", "did you mean `class_tokens`?"),
        ("sd", "dataset", "trigger_word", "`captions: {caption_prefix: ...}`"),
        ("musubi", "dataset", "image_jsonl_file", "write the list as `path` in datasets.NAME"),
        ("sd", "trainer", "lora_weights", "did you mean `init_lora`?"),
        ("musubi", "trainer", "lora_weights", "`arguments: [--network_weights, FILE]` in one of"),
        ("sdscripts", "trainer", "masked_loss", "`alpha_mask: true` in datasets.NAME and `arg"),
        ("musubi", "trainer", "network_type", "did you mean `network_module`?"),
        ("sd", "trainer", "network_module", "sd and wan train LoRAs only"),
        ("wan", "trainer", "network_args", "sd and wan train LoRAs only"),
        ("musubi", "trainer", "network_weights", "arguments: [--network_weights, ...]"),
        ("wan", "run", "lora_scale", "write `lora_strength` in runs.NAME.generate"),
        ("sd", "dataset", "train_data_dir", "did you mean `path`?"),
        ("sd", "dataset", "shuffle_caption", "`shuffle_caption` belongs to datasets.NAME.captions"),
        # A key of another kind of trainer is no key of this one.
        ("musubi", "trainer", "prediction_type", "belongs to a trainer of kind sd"),
    ],
)
def test_a_word_of_another_program_is_answered_with_what_to_write(
    kind: str, place: str, word: str, expected: str
) -> None:
    values = configuration(kind)
    section: Any = values
    for key in PLACES[place]:
        section = section[key]
    section[word] = 1
    assert expected in message(values)


def test_the_words_are_those_of_trainings_and_not_of_machines() -> None:
    for section, word, expected in (
        ("cluster", "num_gpus", "known here: partition, account"),
        ("export", "output_dir", "known here: folder"),
        ("musubi_tuner", "directory", "did you mean `path`?"),
        ("sd_scripts", "batch_size", "`batch_size` belongs to musubi_tuner"),
    ):
        values = configuration("musubi")
        values.setdefault(section, {})[word] = 1
        assert expected in message(values)
    values = configuration("sd")
    values["models"]["m"]["vae"] = {"path": "vae", "folder": "vae"}
    assert "did you mean `path`?" in message(values)


def test_every_key_that_is_advised_exists_and_every_answer_says_what_to_do() -> None:
    known = {key for section in sections(Config) for key in section.model.model_fields}
    keys, answers = foreign_words()
    assert {key for advised in keys.values() for key in advised} <= known
    assert all(x.startswith(("leave it out", "write ", "name ")) for x in answers.values())


def test_neither_names_nor_values_are_answered_with_a_regular_expression() -> None:
    values = configuration("sd")
    values["datasets"]["schöne Katzen"] = values["datasets"].pop("cats")
    values["runs"]["r"]["datasets"] = ["schöne Katzen"]
    line = message(values)
    assert line.startswith('datasets.schöne Katzen: "schöne Katzen" is not allowed here')
    assert "use letters (A-Z, a-z), digits, `.`, `_` and `-`" in line
    for key, value in (("caption_extension", "txt"), ("background", "whit")):
        values = configuration("sd")
        values["datasets"]["cats"][key] = value
        line = message(values)
        assert "; use " in line and not any(pattern in line for pattern in PATTERNS)


def test_variables_and_home_in_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MODELS", "/big/models")
    values = configuration("sd")
    values["datasets"]["cats"]["path"] = "~/cats"
    values["models"]["m"] |= {"vae": "$MODELS/vae", "unet": {"path": "${MODELS}/a$$b"}}
    values["musubi_tuner"]["venv"] = "~/venv"
    found = parse(values)
    assert found.datasets["cats"].path == "/home/me/cats"
    model = found.models["m"]
    assert (model.vae.path, model.unet and model.unet.path) == (
        "/big/models/vae",
        "/big/models/a$b",
    )
    assert found.musubi_tuner and found.musubi_tuner.venv == "/home/me/venv"
    monkeypatch.delenv("MODELS")
    line = message(values)
    assert line.startswith("models.m.vae.path: ") and "MODELS" in line and "not set" in line


def test_a_resolution_without_bound_is_refused() -> None:
    for written in (1048576, "1048576", [512, 8193]):
        values = configuration("sd")
        values["runs"]["r"]["resolutions"] = [written]
        line = message(values)
        assert line.startswith("runs.r.resolutions.0.") and line.endswith("; use 8192 or less")
    parse(configuration("sd") | {"export": {"resolution": 8192}})
