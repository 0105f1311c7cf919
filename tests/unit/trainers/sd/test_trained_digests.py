"""Digests of what shapes weights: those of earlier releases, so that what is trained stays so."""

from __future__ import annotations

from pathlib import Path

from latentmake.config.trainers import SdTrainer
from latentmake.runs.order import VERSION
from trainer_world import make_order


def test_digests_are_those_of_earlier_releases(tmp_path: Path) -> None:
    """What was trained by them is trained."""
    order = make_order(
        tmp_path, prompts=True, steps=12, rank=4, alpha=2.0, seed=7, samples={"guidance_scale": 2.0}
    )
    assert order.wanted() == {
        "dataset": "d" * 64,
        "settings": "609d02f4425f9b7f2a57f7c516863412384065ebcadafe79668b13bd5bc881f0",
        "network": "w" * 64,
        VERSION: 1,
    }


def test_a_default_is_changed_with_the_version_alone() -> None:
    """Settings that have their default, or had it first, are no part of the digest."""
    defaults = SdTrainer(kind="sd").model_dump(mode="json", exclude={"samples"})
    defaults |= SdTrainer.former_defaults
    assert {key: defaults[key] for key in DEFAULTS} == DEFAULTS


DEFAULTS = {
    "adapter": "lora",
    "rank": 8,
    "alpha": None,
    "target_modules": ["to_q", "to_k", "to_v", "to_out.0"],
    "lora_dropout": 0.0,
    "parts": [],
    "reinitialize": [],
    "steps": None,
    "epochs": None,
    "optimizer": "adamw",
    "optimizer_arguments": {},
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_min_ratio": 0.0,
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "weight_decay": 0.01,
    "prediction_type": None,
    "snr_gamma": None,
    "noise_offset": 0.0,
    "ema_decay": None,
    "mixed_precision": "no",
    "gradient_checkpointing": False,
    "torch_compile": False,
    "deterministic": False,
    "seed": 0,
}
