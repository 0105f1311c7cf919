"""Differences of recipes are named as the configuration names them; sources are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.models import recipe
from latentmake.models import recipe_differences as programs
from latentmake.models.recipe_differences import recipe_differences

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


def test_what_a_header_says_leads_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs.keep("ab", "musubi-tuner", {"a.py": "1"})
    Path("other.json").write_text(json.dumps({"name": "x", "files": {}}))
    assert programs.program_of("ab") == ("musubi-tuner", {"a.py": "1"})
    assert programs.program_of("../../other") is None
    Path(".latentmake/programs/ab.json").write_text("[]")
    assert programs.program_of("ab") is None


def test_new_and_missing_files_count_as_changed() -> None:
    before = programs.Program("musubi-tuner", {"a.py": "1", "b.py": "2", "c.py": "3"})
    now = programs.Program("musubi-tuner", {"a.py": "1", "b.py": "4", "d.py": "3"})
    assert programs._changed(before, now) == ["b.py", "c.py", "d.py"]
    assert programs._changed(now, now) == []
