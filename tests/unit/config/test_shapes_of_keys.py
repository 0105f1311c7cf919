"""Every key of the configuration declares what it shapes, and what follows from it agrees."""

from __future__ import annotations

import pytest
from config_keys import keys_of
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer
from latentmake.config.fields import shaping
from latentmake.config.root import Config
from latentmake.config.trainers import SdTrainer, WanTrainer
from pydantic import BaseModel

KEYS = list(keys_of(Config))


def test_a_key_shapes_something_or_is_a_fact_of_the_machine_alone() -> None:
    assert len(KEYS) > 200
    for path, _, shapes in KEYS:
        assert shapes.kinds, path
        assert "machine" not in shapes.kinds or shapes.kinds == ("machine",), path


@pytest.mark.parametrize("trainer", [SdTrainer, WanTrainer, MusubiTrainer, SdScriptsTrainer])
def test_a_digest_of_settings_has_every_key_that_shapes_the_weights(
    trainer: type[BaseModel],
) -> None:
    kind = trainer.__name__.removesuffix("Trainer").lower()
    found = shaping(trainer(kind=kind), "weights")
    declared = {
        path[-1]
        for path, section, shapes in KEYS
        if section is trainer and "weights" in shapes.kinds and not shapes.indirect
    }
    assert set(found) == declared
    assert {"learning_rate"} <= declared
