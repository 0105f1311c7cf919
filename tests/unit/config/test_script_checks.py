"""Settings that an architecture's training script refuses: one line, while the file is read."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.base.errors import ConfigError
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.models import Model
from latentmake.config.root import training_faults
from refused_settings import REFUSED, TAKEN
from rows_world import ROWS, VERSIONS, model_of


def check(name: str, changes: dict[str, Any]) -> None:
    task = next(iter(ROWS[name].versions))
    trainer = MusubiTrainer.model_validate({"kind": "musubi", **changes})
    model = Model.model_validate(model_of(name, task))
    for where, what, hint in training_faults("runs.cats.trainer", trainer, model):
        raise ConfigError(what, where=where, hint=hint)


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
    model = Model.model_validate(model_of(name, task))
    assert [*training_faults("trainer", trainer, model)] == []


def test_an_attention_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out --sage_attn: SageAttention has no backward"):
        check("wan", {"arguments": ["--sage_attn"]})
    with pytest.raises(ValueError, match="'flash_attn'"):
        check("wan", {"attention": "sage_attn"})
