"""Settings of the trainer `wan`: what is refused in one line, and what trains nothing again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.base.errors import ConfigError
from latentmake.config.root import parse
from latentmake.config.trainers import WanTrainer
from latentmake.trainers.wan.dit import boundary_of
from refusals import refused
from wan_trainer_world import configuration, make_order


@pytest.mark.parametrize(
    ("model", "trainer", "run", "words"),
    [
        ({"task": None, "dit": None}, {}, {}, "reads caches of the layout musubi, and m has plain"),
        ({"dit": None}, {}, {}, "runs.r.model: the model m has no `dit` to train"),
        ({"task": "t2v-1.3B-FC"}, {}, {}, "the trainer wan does not train t2v-1.3B-FC"),
        (
            {"task": "i2v-14B", "clip": "c"},
            {"samples": {"prompts": ["x"]}},
            {},
            "runs.r.trainer.samples: i2v-14B draws from a picture",
        ),
        ({}, {"samples": {"frames": 8}}, {}, "is not 4 n + 1"),
        ({}, {"samples": {"resolution": [40, 48]}}, {}, "40x48 is not made of multiples of 16"),
        ({}, {}, {"resolutions": [[72, 48]]}, "72 pixels are not a multiple of 16, as Wan needs"),
        ({}, {"timestep_boundary": 900}, {}, "(t2v-1.3B) has one network, and no boundary"),
        ({}, {"steps": 3, "epochs": 2}, {}, "`epochs` and `steps` are both set"),
        ({"encoder": "musubi"}, {}, {}, "musubi_tuner: this key is missing"),
    ],
)
def test_what_does_not_fit_is_one_line(
    model: dict[str, Any], trainer: dict[str, Any], run: dict[str, Any], words: str
) -> None:
    line = refused(lambda: parse(configuration(model, trainer, **run)), kind=ConfigError)
    assert words in line
    assert "musubi-tuner" not in line or "encoder" in model


def test_two_networks_meet_where_wan_was_trained() -> None:
    for task, share in (("t2v-A14B", 0.875), ("i2v-A14B", 0.9), ("t2v-14B", None)):
        found = parse(configuration({"task": task}))
        trainer = found.runs["r"].trainer
        assert isinstance(trainer, WanTrainer)
        assert boundary_of(trainer, found.models["m"]) == share
    own = WanTrainer(kind="wan", timestep_boundary=500)
    assert boundary_of(own, parse(configuration({"task": "t2v-A14B"})).models["m"]) == 0.5


def test_a_default_that_is_written_down_trains_nothing_again(tmp_path: Path) -> None:
    order = make_order(tmp_path)

    def weights(**settings: Any) -> str:
        changed = order.model_copy(update={"trainer": WanTrainer(kind="wan", **settings)})
        return changed.settings_digest()

    assert weights(flow_shift=3.0, timestep_boundary=875) == weights()
    assert weights(checkpointing_steps=7, dataloader_num_workers=3) == weights()
    assert weights(samples={"frames": 5}) == weights() != weights(rank=8)
