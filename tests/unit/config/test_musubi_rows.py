"""Rows of musubi-tuner's architectures: each makes a model, and refuses what its scripts refuse."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.models import Model
from latentmake.config.root import training_faults
from latentmake.layouts.layout import layout_of
from pydantic import ValidationError
from refused_settings import REFUSED, TAKEN
from rows_world import ROWS, VERSIONS, model_of


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_each_version_of_each_row_makes_a_model(name: str, task: str) -> None:
    model = Model.model_validate(model_of(name, task))
    assert model.layout == "musubi" and (model.encoder == "musubi") != model.spec.encodes
    assert Model.model_validate(model.model_dump()) == model
    scripts = ROWS[name]
    layout = layout_of(model.layout_name)
    assert layout.latents_ending == f"_{scripts.suffix}.safetensors"
    assert layout.text_ending == f"_{scripts.suffix}_te.safetensors"
    for file in (*scripts.latents.files, *scripts.text.files):
        assert not file.required or model.weights(file.key) is not None
    assert [*training_faults("trainer", MusubiTrainer(kind="musubi"), model)] == []


def test_suffixes_differ_and_have_no_underscore() -> None:
    found = [scripts.suffix for scripts in ROWS.values()]
    assert len(found) == len(set(found))
    assert not [each for each in found if "_" in each]


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("qwen_image", {"task": "edit"}, "no task of Qwen-Image"),
        ("qwen_image_edit", {"task": None}, "a `task` is needed for Qwen-Image-Edit; known: edit"),
        ("qwen_image", {"vae_dtype": "float32"}, "vae_dtype"),
        ("qwen_image", {"encoder": "latentmake"}, "`encoder: latentmake` is not for Qwen-Image"),
        ("qwen_image", {"text": ["a", "b"]}, "has 1 text encoder"),
        ("qwen_image", {"clip": "c"}, "`clip` is only for image-to-video with Wan 2.1: leave"),
        ("flux_kontext", {"text": ["a"]}, "has 2 text encoders"),
        ("flux_kontext", {"text": None}, "this key is missing"),
        ("z_image", {"fp8_t5": True}, "`fp8_t5` is only for Wan"),
        (
            "hidream_o1",
            {"task": "t2i", "vae": "v"},
            "`vae` is not for this architecture, which has",
        ),
        ("qwen_image", {"unet": "u"}, "`unet` is only for `layout: plain`"),
    ],
)
def test_a_model_that_does_not_fit_its_row_is_refused(
    name: str, changes: dict[str, Any], word: str
) -> None:
    values = model_of(name, next(iter(ROWS[name].versions))) | changes
    with pytest.raises(ValidationError, match=word):
        Model.model_validate({key: value for key, value in values.items() if value is not None})


def faults(name: str, changes: dict[str, Any]) -> list[str]:
    """Return where and what a training script of an architecture refuses of settings."""
    trainer = MusubiTrainer.model_validate({"kind": "musubi", **changes})
    model = Model.model_validate(model_of(name, next(iter(ROWS[name].versions))))
    return [
        f"{where}: {what}; {hint}" for where, what, hint in training_faults("t", trainer, model)
    ]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_what_a_training_script_refuses_is_refused_before(
    name: str, changes: dict[str, Any], words: str
) -> None:
    said = faults(name, changes)
    assert words in said[0] and said[0].startswith("t.")


@pytest.mark.parametrize(("name", "changes"), TAKEN)
def test_what_a_training_script_takes_is_taken(name: str, changes: dict[str, Any]) -> None:
    assert faults(name, changes) == []


def test_an_attention_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out --sage_attn: SageAttention has no backward"):
        faults("wan", {"arguments": ["--sage_attn"]})
    with pytest.raises(ValueError, match="'flash_attn'"):
        faults("wan", {"attention": "sage_attn"})
