"""Differences of recipes and placements are named as the configuration names them."""

from __future__ import annotations

from typing import Any

import pytest
from item_world import inputs_of
from latentmake import digest, layouts
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.files.cachefile import Header, Picture, target_key
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.models import recipe
from latentmake.plan.differences import placement_differences
from latentmake.plan.explain import recipe_differences

OLD, NEW = digest.of_bytes(b"old"), digest.of_bytes(b"new")
BEFORE, NOW = f"{OLD[:8]}..", f"{NEW[:8]}.."


def model(**keys: Any) -> Model:
    return Model(**{"vae": "models/vae", "text": ["models/clip", "models/t5"], **keys})


def test_weights_are_named_with_digests_and_path() -> None:
    old = recipe.latents_recipe(Dataset(path="a"), model(), OLD)
    new = recipe.latents_recipe(Dataset(path="a"), model(dtype="bfloat16"), NEW)
    assert [*map(str, recipe_differences(old, new, model()))] == [
        f"VAE's digest {BEFORE} -> {NOW} (models/vae)",
        "dtype float32 -> bfloat16",
    ]
    assert recipe_differences(old, old) == []


def test_each_text_encoder_and_tokenizer_has_its_own_name() -> None:
    old = recipe.text_recipe(model(), [(OLD, OLD), (OLD, OLD)])
    new = recipe.text_recipe(model(), [(OLD, NEW), (NEW, OLD)])
    assert [*map(str, recipe_differences(old, new, model()))] == [
        f"text encoder's tokenizer's digest {BEFORE} -> {NOW} (models/clip)",
        f"text encoder 2's digest {BEFORE} -> {NOW} (models/t5)",
    ]
    one = recipe.text_recipe(model(text=["models/clip"]), [(OLD, OLD)])
    (found, *_) = recipe_differences(old, one, model())
    assert str(found) == f"text encoder 2's digest {BEFORE} -> absent"


def test_a_key_that_a_recipe_does_not_name_has_its_default() -> None:
    old = recipe.latents_recipe(Dataset(path="a", background="#102030"), model(), OLD)
    new = recipe.latents_recipe(Dataset(path="a", exif_rotation=False), model(), OLD)
    assert [*map(str, recipe_differences(old, new))] == [
        "exif_rotation true -> false",
        "background #102030 -> white",
    ]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, []),
        ({}, {"fit": "bucket"}, ["fit crop -> bucket"]),
        ({"fit": "bucket"}, {}, ["fit bucket -> crop"]),
        (
            {"fit": "bucket", "bucket_reso_steps": 32},
            {"fit": "bucket", "bucket_no_upscale": True},
            ["bucket_no_upscale false -> true", "bucket_reso_steps 32 or 64 -> none"],
        ),
        ({"fit": "bucket", "bucket_reso_steps": 24}, {}, []),
    ],
)
def test_another_placement_is_told_by_the_settings_that_give_the_key(
    before: dict[str, Any], now: dict[str, Any], words: list[str]
) -> None:
    layout, size = layouts.of("plain"), Size(200, 300)
    was, named = (
        layout.variant(Size(256, 256), size, Dataset(path="a", **each), None)
        for each in (before, now)
    )
    header = Header(target_key(NEW, OLD, was), NEW, OLD, picture=Picture(*size, upright=True))
    found = placement_differences(
        Memo(None), layout, Dataset(path="a", **now), "256", inputs_of("x", "x.png"), header
    )
    *settings, last = [*map(str, found)] or [""]
    assert settings == words
    known = was if words else "others"
    assert last == (f"size and crop {known} -> {named}" if was != named else "")


def test_a_key_that_was_edited_is_no_crash_where_no_bucket_fits() -> None:
    layout = layouts.of("plain")
    header = Header(OLD, NEW, OLD, picture=Picture(40, 36, upright=True))
    asked = Memo(None), layout, Dataset(path="a")
    (found,) = placement_differences(*asked, "16", inputs_of("x", "x.png"), header)
    assert found.old == "others"
    assert placement_differences(*asked, "text", inputs_of("x", "x.txt"), header) == []


@pytest.mark.parametrize("size", [Size(1600, 200), Size(300, 1100), Size(700, 500)])
@pytest.mark.parametrize("least", [(None, 64), (64, 128), (128, 320), (320, None)])
def test_no_setting_is_named_that_others_could_be(
    size: Size, least: tuple[int | None, int | None]
) -> None:
    layout = layouts.of("sdscripts-sdxl")
    before, now = (Dataset(path="a", fit="bucket", min_bucket_reso=each) for each in least)
    was = layout.variant(Size(512, 512), size, before, None)
    header = Header(target_key(NEW, OLD, was), NEW, OLD, picture=Picture(*size, upright=True))
    asked = inputs_of("x", "x.png"), header
    found = placement_differences(Memo(None), layout, now, "512", *asked)
    assert {each.name for each in found} <= {"min_bucket_reso", "size and crop"}
    assert bool(found) == (was != layout.variant(Size(512, 512), size, now, None))
