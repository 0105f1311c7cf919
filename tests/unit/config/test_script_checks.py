"""Settings that an architecture's training script refuses: one line, while the file is read."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.config import Model, MusubiTrainer
from latentmake.config.script_checks import check_training
from latentmake.errors import ConfigError
from rows_world import ROWS, VERSIONS, model_of

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen_image", {"mixed_precision": "fp16"}, "mixed_precision: Qwen-Image is not trained in"),
    ("krea2", {"fp8_base": True}, "fp8_base: Krea 2 takes fp8_base and fp8_scaled together"),
    ("hidream_o1", {"fp8_base": True}, "set `fp8_scaled: true` too"),
    ("hunyuan_video", {"fp8_base": True, "fp8_scaled": True}, "fp8_scaled: the training script"),
    ("ideogram4", {"fp8_base": True}, "fp8_base: the training script of Ideogram 4 does not"),
    ("ideogram4", {"arguments": ["--blocks_to_swap", "34"]}, "use 33 or less"),
    ("ideogram4", {"arguments": ["--sample_prompts", "p.txt"]}, "needs --text_encoder and --vae"),
    ("ideogram4", {"arguments": ["--weighting_scheme=mode"]}, "--weighting_scheme mode"),
    ("hidream_o1", {"arguments": ["--weighting_scheme", "mode"]}, "use none, or leave it out"),
    ("krea2", {"arguments": ["--turbo_dit_cache"]}, "needs --turbo_dit beside --turbo_dit_cache"),
    (
        "krea2",
        {"arguments": ["--turbo_dit", "t.safetensors", "--blocks_to_swap", "3"]},
        "refuses --turbo_dit beside --blocks_to_swap",
    ),
    ("qwen_image", {"arguments": ["--remove_first_image_from_target"]}, "leave it out"),
    ("framepack", {"arguments": ["--vae_dtype", "bfloat16"]}, "use float16"),
    ("z_image", {"timestep_boundary": 800}, "one network"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("krea2", {"fp8_base": True, "fp8_scaled": True}),
    ("hunyuan_video", {"fp8_base": True}),
    ("z_image", {"fp8_base": True, "mixed_precision": "fp16"}),
    ("qwen_image_layered", {"arguments": ["--remove_first_image_from_target"]}),
    ("krea2", {"arguments": ["--turbo_dit", "t.safetensors", "--turbo_dit_cache"]}),
    ("ideogram4", {"arguments": ["--blocks_to_swap", "33", "--weighting_scheme", "none"]}),
]


def check(name: str, changes: dict[str, Any]) -> None:
    task = next(iter(ROWS[name].versions))
    trainer = MusubiTrainer.model_validate({"kind": "musubi", **changes})
    check_training("cats", trainer, Model.model_validate(model_of(name, task)))


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_what_a_training_script_refuses_is_refused_before(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(name, changes)
    assert words in str(error.value)
    assert str(error.value).startswith("runs.cats.trainer.")


@pytest.mark.parametrize(("name", "changes"), TAKEN)
def test_what_a_training_script_takes_is_taken(name: str, changes: dict[str, Any]) -> None:
    check(name, changes)


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_the_defaults_fit_each_version(name: str, task: str) -> None:
    trainer = MusubiTrainer(kind="musubi")
    check_training("cats", trainer, Model.model_validate(model_of(name, task)))
