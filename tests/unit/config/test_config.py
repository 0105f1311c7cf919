"""Each mistake in a configuration is one line with key, value and hint."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from config_world import changed, smallest
from latentmake.base.errors import ConfigError, nearest
from latentmake.config.datasets import Dataset
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.models.inspection import check_run


def message(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Name of the mistake: key = value -> what its line says besides the key.
_TABLE = r"""
misspelt key at the top: modles = {} -> did you mean `models`?
misspelt key of a dataset: datasets.cats.num_repeat = 2 -> did you mean `num_repeats`?
misspelt key of a text encoder: models.tiny.text = [{"path": "text_encoder", "tokeniser": "t"}]
    -> models.tiny.text.0.tokeniser | did you mean `tokenizer`?
misspelt key of samples: runs.first.trainer.samples = {"promts": []}
    -> runs.first.trainer.samples.promts | did you mean `prompts`?
a word for a list: models.tiny.text_arguments = "--fp8_vl" -> write it as a list: [--fp8_vl]
misspelt architecture: models.tiny.architecture = "qwen_imag_edit"
    -> "qwen_imag_edit" is not known here; did you mean `qwen_image_edit`?
architecture as people write it: models.tiny.architecture = "FLUX.2-klein-4B"
    -> did you mean `flux_2_klein_4b`?
key of the trainer in a dataset: datasets.cats.learning_rate = 0.0001
    -> `learning_rate` belongs to runs.NAME.trainer
key of a dataset in the trainer: runs.first.trainer.num_repeats = 2
    -> `num_repeats` belongs to datasets.NAME
key that nothing resembles: batch = {"zzz": 1} -> batch.zzz | known here: items
dataset that is not there: runs.first.datasets = ["cat"] -> `cat` | did you mean `cats`?
model that is not there: runs.first.model = "tiny-sd" -> `tiny-sd` | did you mean `tiny`?
dataset named twice: runs.first.datasets = ["cats", "cats"] -> `cats` is named twice
resolution named twice in two spellings: runs.first.resolutions = [64, [64, 64]]
    -> `64` is named twice
text for a number: runs.first.trainer.rank = "eight" -> "eight" | integer
number too small: datasets.cats.num_repeats = 0 -> num_repeats | 0 | 1
word that is no choice: datasets.cats.fit = "stretch" -> "stretch" | crop | bucket
trainer that is not there: runs.first.trainer.kind = "wann" -> "wann" | sd
warm-up of a constant rate: runs.first.trainer.lr_warmup_steps = 10
    -> runs.first.trainer | `lr_warmup_steps` has no effect | constant_with_warmup
truth for a text: datasets.cats.class_tokens = true -> true is no text; put it in quotes
number for a text: runs.first.model = 10 -> 10 is no text; put it in quotes
section for a text: datasets.cats.captions = {"caption_prefix": {"folder": null}}
    -> captions.caption_prefix: {"folder": null} is no text; put it in quotes
truth for a replacement: datasets.cats.captions = {"replacements": {"old": false}}
    -> captions.replacements.old: false should be text | put them in quotes
nothing for a separator: datasets.cats.captions = {"caption_separator": null}
    -> captions.caption_separator: null is no text; put it in quotes
dropout of an only text: datasets.cats.captions = {"caption_dropout_rate": 0.1}
    -> `caption_dropout_rate` needs `variants: 2`
option that no run heeds: datasets.cats.flip_aug = true
    -> only caches of the layout sdscripts | leave it out
text for a section: datasets.cats = "data/cats" -> "data/cats"
model in one word: models.tiny = "runwayml/sd15"
    -> models.tiny | section with keys | run `hf download runwayml/sd15 --local-dir models/sd15`
name of the hub for a model: runs.first.model = "runwayml/sd15"
    -> there is no model | known: tiny; run `hf download runwayml/sd15 --local-dir models/sd15`
hub without revision: models.tiny.vae = {"hub": "someone/vae"}
    -> `revision` | huggingface.co/someone/vae/commits/main
hub with a branch: models.tiny.vae = {"hub": "someone/vae", "revision": "fp16"}
    -> 40 hexadecimal digits | someone/vae/commits/fp16 lists
neither path nor hub: models.tiny.vae = {"config": "c"} -> either `path` or `hub`
both path and hub: models.tiny.vae = {"path": "p", "hub": "h", "revision": "r"}
    -> either `path` or `hub`
trainer without a network: models.tiny.unet = null
    -> runs.first.model | tiny | `unet` | models.tiny
name with a slash: datasets.a/b = {"path": "x"} -> "a/b"
resolution of three sides: runs.first.resolutions = [[1, 2, 3]]
    -> runs.first.resolutions.0 | [1, 2, 3] | [width, height]
resolution that is no size: runs.first.resolutions = ["wide"]
    -> runs.first.resolutions.0 | "wide" | [width, height]
caption ending without a dot: datasets.cats.caption_extension = "txt" -> "txt"
colour that is not there: datasets.cats.background = "whit" -> "whit"
truth for a number: runs.first.trainer.rank = true -> true
key of ai_training that is not there: models.tiny.ai_training = {"latent": ".img_sdxl"}
    -> models.tiny.ai_training.latent | did you mean `latents`?
endings of too many text encoders: models.tiny.ai_training = {"text": [".txt_t5cache",
    ".txt_clipl"]}
    -> models.tiny | 2 endings for 1 text encoders
adoption of nothing: models.tiny.ai_training = {} -> `latents`
batch of no item: batch = {"items": 0}
    -> batch.items: 0 should be 1 or more, or auto; see config/README.md
seed beyond 63 bits: runs.first.trainer.seed = 18446744073709551616 -> is too large a number
seed below zero: runs.first.trainer.samples = {"seed": -1} -> samples.seed | use 0 or more
rate beyond all rates: runs.first.trainer.learning_rate = 1e5 -> 100000.0 | use 1000 or less
rate that float32 does not hold: runs.first.trainer.learning_rate = "1e308" -> is too large
rate that is no number: runs.first.trainer.learning_rate = "inf" -> "inf" | finite
decay that float32 does not hold: runs.first.trainer.weight_decay = 1e39 -> is too large
argument that float32 does not hold: runs.first.trainer.optimizer_arguments = {"eps": 1e308}
    -> optimizer_arguments.eps: 1e+308 should be a number
NUL in a path: datasets.cats.path = "data/\u0000" -> datasets.cats.path: holds a NUL character
NUL in a prompt: runs.first.trainer.samples = {"prompts": ["a\u0000b"]}
    -> samples.prompts.0: holds a NUL character; remove it
NUL in a key: runs.first.trainer.optimizer_arguments = {"\u0000": 1} -> holds a NUL character
no prompts in their list: runs.first.trainer.samples = {"prompts": []}
    -> samples.prompts: is an empty list; write a prompt, or leave the key out
no prompts of pictures: runs.first.generate = {"prompts": []} -> generate.prompts: is an empty list
argument of an optimizer: runs.first.trainer.optimizer_arguments = {"betas": ["a"]}
    -> optimizer_arguments.betas: ["a"] should be a number, true, false, or a list of numbers
"""
MISTAKES: dict[str, tuple[tuple[str, ...], Any, list[str]]] = {}
for row in re.split(r"\n(?! )", _TABLE.strip()):
    found = re.fullmatch("(.*?): (.*?) = (.*) ->(.*)", " ".join(row.split()))
    assert found
    words = [word.strip() for word in found[4].split(" | ")]
    MISTAKES[found[1]] = (tuple(found[2].split(".")), json.loads(found[3]), words)


@pytest.mark.parametrize(
    "changes",
    [{"task": "t2v-14B"}, {"posterior": "sample"}, {"architecture": "sdxl", "layout": "sdscripts"}],
)
def test_a_model_whose_caches_are_of_another_kind_adopts_none(changes: dict[str, str]) -> None:
    values = changed("models", "tiny", "ai_training", value={"latents": ".img_sdxl"})
    values["models"]["tiny"] |= changes
    del values["models"]["tiny"]["unet"], values["runs"]["first"]["trainer"]
    assert "ai_training" in message(values)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_key_value_and_mend(name: str) -> None:
    path, value, expected = MISTAKES[name]
    line = message(changed(*path, value=value))
    assert [each for each in expected if each not in line] == [] and path[-1] in line
    assert "Traceback" not in line
    assert "https://" not in line
    assert ";" in line or "?" in line  # what is wrong, then the hint


def test_a_run_that_cannot_leave_items_out_refuses_to_hold_out() -> None:
    values = changed("runs", "first", "validation", value={"items": 2})
    values["runs"]["first"]["trainer"] = None
    assert message(values).startswith("runs.first.validation: the run has no trainer")


def test_a_misspelt_key_is_not_reported_missing_as_well() -> None:
    values = smallest()
    values["modles"] = values.pop("models")
    assert message(values) == "modles: unknown key; did you mean `models`?"


@pytest.mark.parametrize("section", ["datasets", "models", "runs"])
def test_a_name_is_at_most_as_long_as_names_of_files_allow(section: str) -> None:
    values = smallest()
    values[section]["c" * 201] = next(iter(values[section].values()))
    assert "is not allowed here; use letters" in message(values)
    values[section]["c" * 200] = values[section].pop("c" * 201)
    assert "c" * 200 in getattr(parse(values), section)


def test_of_many_mistakes_those_that_fit_into_a_line_are_named_and_the_others_counted() -> None:
    values = smallest()
    values["runs"]["first"]["trainer"] |= {f"rank{number}": 8 for number in range(50)}
    line = message(values)
    assert "rank0: unknown key" in line and line.endswith("more") and len(line) <= 500


def test_two_mistakes_are_both_named() -> None:
    line = message({})
    assert all(f"{section}: this key is missing" in line for section in ("datasets", "models"))


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


@pytest.mark.parametrize(
    ("word", "expected"), [("num_repeat", "num_repeats"), ("FIT", "fit"), ("zzzz", None)]
)
def test_nearest_finds_what_was_meant_or_nothing(word: str, expected: str | None) -> None:
    assert nearest(word, Dataset.model_fields) == expected


def test_a_message_is_short_however_long_a_value_is_and_many_mistakes_are() -> None:
    long = "x" * 10_000
    for path, value in (
        (("runs", "first", "model"), long),
        (("runs", "first", "datasets"), [long]),
        (("runs", "first", "trainer", "kind"), long),
        (("runs", "first", "trainer", "target_modules"), long),
        (("datasets", "cats", "path"), f"${long}"),
        (("datasets", "cats", "fit"), [long]),
    ):
        assert "x" * 81 not in message(changed(*path, value=value))
