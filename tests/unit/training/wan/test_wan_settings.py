"""Settings of the trainer `wan`: what each shapes, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.config.root import parse
from latentmake.config.trainers import WanSamples, WanTrainer
from latentmake.errors import ConfigError
from latentmake.training.wan.dit import WanOrder, boundary_of
from reference.schema import declared
from wan_trainer_world import make_order

# Another value of each key, with what it needs beside it.
CHANGES: dict[str, Any] = {
    "rank": 8,
    "alpha": 2.0,
    "target_modules": ["to_q"],
    "steps": 3,
    "epochs": 3,
    "max_steps": 2,
    "flow_shift": 7.0,
    "timestep_sampling": "uniform",
    "timestep_boundary": 900,
    "optimizer": "lion",
    "optimizer_arguments": {"betas": [0.5, 0.9]},
    "learning_rate": 1e-3,
    "lr_scheduler": "linear",
    "lr_warmup_steps": 2,
    "lr_min_ratio": 0.1,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": None,
    "weight_decay": 0.1,
    "lora_dropout": 0.1,
    "ema_decay": 0.9,
    "mixed_precision": "fp16",
    "gradient_checkpointing": False,
    "torch_compile": True,
    "deterministic": True,
    "seed": 1,
    "checkpointing_steps": 7,
    "checkpointing_epochs": 2,
    "checkpoints_total_limit": 5,
    "save_every_n_steps": 2,
    "on_change": "continue",
    "save_every_n_epochs": 2,
    "dataloader_num_workers": 3,
    "accelerate_config": "a.yaml",
}
SAMPLES: dict[str, Any] = {
    "prompts": ["another"],
    "negative_prompt": "grey",
    "every": 3,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "seed": 1,
    "frames": 5,
    "fps": 8,
}
BESIDE = {
    "lr_warmup_steps": {"lr_scheduler": "linear"},
    "lr_min_ratio": {"lr_scheduler": "linear"},
}


@pytest.fixture
def order(tmp_path: Path) -> WanOrder:
    return make_order(tmp_path)


def digests(order: WanOrder, **settings: Any) -> tuple[str, str]:
    trainer = WanTrainer(kind="wan", **settings)
    used = {"flow_shift": trainer.flow_shift or 3.0, "boundary": trainer.timestep_boundary or 875}
    changed = order.model_copy(update={"trainer": trainer, **used})
    return changed.settings_digest(), changed.pictures_digest()


def test_each_key_shapes_what_it_declares(order: WanOrder) -> None:
    # Not by their value: the kind, sections, the content of a LoRA.
    rest = {"kind", "samples", "init_lora"}
    assert CHANGES.keys() == WanTrainer.model_fields.keys() - rest
    for key, value in CHANGES.items():
        before = digests(order, **BESIDE.get(key, {}))
        after = digests(order, **BESIDE.get(key, {}), **{key: value})
        shapes = "weights" in declared(WanTrainer, key).kinds
        assert (after[0] != before[0]) == shapes, key
        assert (after[1] == before[1]) == (key != "flow_shift"), key  # it shapes samples too
    # The resolution counts as what it is: a size.
    assert SAMPLES.keys() == WanSamples.model_fields.keys() - {"resolution"}
    for key, value in SAMPLES.items():
        before, after = digests(order), digests(order, samples={key: value})
        assert after[0] == before[0] and after[1] != before[1], key


def test_a_default_that_is_written_down_trains_nothing_again(order: WanOrder) -> None:
    assert digests(order, flow_shift=3.0, timestep_boundary=875) == digests(order)


def configuration(model: dict[str, Any], trainer: dict[str, Any], **run: Any) -> dict[str, Any]:
    values = {"vae": "vae", "text": "text", "task": "t2v-1.3B", "dit": "dit", **model}
    return {
        "datasets": {"films": {"path": "films", "target_frames": [5]}},
        "models": {"m": {key: value for key, value in values.items() if value is not None}},
        "runs": {
            "r": {
                "datasets": ["films"],
                "model": "m",
                "resolutions": [[64, 48]],
                "trainer": {"kind": "wan", **trainer},
                **run,
            }
        },
    }


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
    with pytest.raises(ConfigError) as error:
        parse(configuration(model, trainer, **run))
    line = str(error.value)
    assert words in line and "\n" not in line
    assert "musubi-tuner" not in line or "encoder" in model


def test_two_networks_meet_where_wan_was_trained() -> None:
    for task, share in (("t2v-A14B", 0.875), ("i2v-A14B", 0.9), ("t2v-14B", None)):
        found = parse(configuration({"task": task}, {}))
        trainer = found.runs["r"].trainer
        assert isinstance(trainer, WanTrainer)
        assert boundary_of(trainer, found.models["m"]) == share
    own = WanTrainer(kind="wan", timestep_boundary=500)
    assert boundary_of(own, parse(configuration({"task": "t2v-A14B"}, {})).models["m"]) == 0.5
