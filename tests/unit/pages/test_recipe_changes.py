"""Differences of recipes are named as the configuration names them; sources are found again."""

from __future__ import annotations

from typing import Any

from latentmake.base import digest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.models import cache_recipe
from latentmake.pages.explanation import recipe_differences

OLD, NEW = digest.of_bytes(b"old"), digest.of_bytes(b"new")
BEFORE, NOW = f"{OLD[:8]}..", f"{NEW[:8]}.."


def model(**keys: Any) -> Model:
    return Model(**{"vae": "models/vae", "text": ["models/clip", "models/t5"], **keys})


def test_weights_are_named_with_digests_and_path() -> None:
    old = cache_recipe.latents_recipe(Dataset(path="a"), model(), OLD)
    new = cache_recipe.latents_recipe(Dataset(path="a"), model(dtype="bfloat16"), NEW)
    assert [*map(str, recipe_differences(old, new, model()))] == [
        f"VAE's digest {BEFORE} -> {NOW} (models/vae)",
        "dtype float32 -> bfloat16",
    ]
    assert recipe_differences(old, old) == []


def test_each_text_encoder_and_tokenizer_has_its_own_name() -> None:
    old = cache_recipe.text_recipe(model(), [(OLD, OLD), (OLD, OLD)])
    new = cache_recipe.text_recipe(model(), [(OLD, NEW), (NEW, OLD)])
    assert [*map(str, recipe_differences(old, new, model()))] == [
        f"text encoder's tokenizer's digest {BEFORE} -> {NOW}",
        f"text encoder 2's digest {BEFORE} -> {NOW} (models/t5)",
    ]
    one = cache_recipe.text_recipe(model(text=["models/clip"]), [(OLD, OLD)])
    (found, *_) = recipe_differences(old, one, model())
    assert str(found) == f"text encoder 2's digest {BEFORE} -> absent"


def test_a_key_that_a_recipe_does_not_name_has_its_default() -> None:
    old = cache_recipe.latents_recipe(Dataset(path="a", background="#102030"), model(), OLD)
    new = cache_recipe.latents_recipe(Dataset(path="a", exif_rotation=False), model(), OLD)
    assert [*map(str, recipe_differences(old, new))] == [
        "exif_rotation true -> false",
        "background #102030 -> white",
    ]


def test_an_update_of_a_program_is_named() -> None:
    old = {"kind": "text", "layout": "musubi", "program": OLD}
    (found,) = recipe_differences(old, {**old, "program": NEW})
    assert str(found) == f"musubi-tuner's digest {BEFORE} -> {NOW}"
