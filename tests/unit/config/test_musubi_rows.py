"""Rows of musubi-tuner's architectures: each makes a model, layout and keys follow from it."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.config.models import Model
from latentmake.layouts.layout import layout_of
from pydantic import ValidationError
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


def test_suffixes_differ_and_have_no_underscore() -> None:
    found = [scripts.suffix for scripts in ROWS.values()]
    assert len(found) == len(set(found))
    assert not [each for each in found if "_" in each]


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("qwen_image", {"task": "edit"}, "no task of Qwen-Image"),
        (
            "qwen_image_edit",
            {"task": None},
            "a `task` is needed for Qwen-Image-Edit; known: edit, edit-2509",
        ),
        ("qwen_image", {"vae_dtype": "float32"}, "vae_dtype"),
        ("qwen_image", {"encoder": "latentmake"}, "`encoder: latentmake` is not for Qwen-Image"),
        ("qwen_image", {"text": ["a", "b"]}, "has 1 text encoder"),
        (
            "qwen_image",
            {"clip": "c"},
            "`clip` is only for image-to-video with Wan 2.1: leave it out",
        ),
        ("flux_kontext", {"text": ["a"]}, "has 2 text encoders"),
        ("flux_kontext", {"text": None}, "this key is missing"),
        ("z_image", {"fp8_t5": True}, "`fp8_t5` is only for Wan"),
        (
            "hidream_o1",
            {"task": "t2i", "vae": "v"},
            "`vae` is not for this architecture, which has no VAE",
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
