"""An encoding job imports what it needs, and its latents are the same for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.caches.encoders.imports import without
from trainer_world import make_vae

ROOT = Path(__file__).parents[3]
JOB = """
import hashlib, json, sys
import numpy as np
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.caches.encoders import load
from latentmake.caches.inputs import Sample
from latentmake.plan.orders import Order
from latentmake.data.item import Item

place, alone = sys.argv[1:]
model = Model(vae=place, text=[place])
order = Order("latents", "d", "m", Dataset(path="d"), model, {"format": 1}, ())
loaded = load.encoder(order, threads=1, say=lambda line: None, alone=alone == "yes")
pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
sample = Sample("0" * 64, "", Item("a"), pixels, (16, 16))
((tensors, metadata),) = loaded.encode([sample])
found = hashlib.sha256(tensors["latents"].numpy().tobytes()).hexdigest()
unused = ("transformers", "peft", "accelerate", "torch._dynamo", "sympy")
modules = [name for name in unused if name in sys.modules]
if alone == "yes":
    import torch

    assert torch.distributed.is_available()
    assert torch.compile(torch.nn.ReLU(), backend="eager")(torch.ones(2)).sum() == 2
print(json.dumps([found, metadata, modules]))
"""


def test_a_job_of_images_imports_no_more_than_it_needs_and_gives_the_same_bytes(
    tmp_path: Path,
) -> None:
    make_vae(tmp_path / "vae")
    found = []
    for alone in ("yes", "no"):
        done = subprocess.run(
            [sys.executable, "-c", JOB, str(tmp_path / "vae"), alone],
            cwd=ROOT / "scripts",
            stdout=subprocess.PIPE,
            check=True,
        )
        found.append(json.loads(done.stdout))
    (latents, metadata, modules), (whole, other, all_modules) = found
    assert (latents, metadata) == (whole, other)
    assert modules == []
    assert all_modules == ["transformers", "peft", "accelerate", "torch._dynamo", "sympy"]


def test_hidden_modules_come_back() -> None:
    with without("tabulate_none", "json"):
        assert sys.modules["json"] is json  # what is imported already stays
        with pytest.raises(ModuleNotFoundError):
            __import__("tabulate_none")
    assert "tabulate_none" not in sys.modules
