"""musubi-tuner's own dataset classes find each text of an item, with its latents, as an item."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import musubi_world
import pytest
import torch
from conftest import PYTHON, Find, answer_of
from latentmake.base import atomic
from latentmake.config.datasets import Dataset
from latentmake.trainers.musubi.deploy import deploy, training_toml
from latentmake.trainers.musubi.order import MusubiOrder
from safetensors.torch import save_file

pytestmark = pytest.mark.real_trainer

SIZE = "64"
# Reads the dataset file as the training script does, and every batch of it.
SCRIPT = """
import argparse, json, multiprocessing, sys
from musubi_tuner.dataset import config_utils
from musubi_tuner.dataset.config_utils import BlueprintGenerator, ConfigSanitizer
config = config_utils.load_user_config(sys.argv[1])
blueprint = BlueprintGenerator(ConfigSanitizer()).generate(
    config, argparse.Namespace(debug_dataset=False), architecture="wan")
group = config_utils.generate_dataset_group_by_blueprint(
    blueprint.dataset_group, training=True, shared_epoch=multiprocessing.Value("i", 0))
found = []
for dataset in group.datasets:
    batches = []
    for number in range(len(dataset)):
        batch = dataset[number]
        batches += [
            [float(latents.flatten()[0]), len(text), list(latents.shape)]
            for latents, text in zip(batch["latents"], batch["t5"], strict=True)
        ]
    found.append(batches)
print(json.dumps(found))
"""


def put(root: Path, dataset: str, stem: str, latents: list[str], texts: int, mark: int) -> Any:
    """Write an item's caches: `mark` is in its latents, and its texts are 1, 2, ... tokens long."""
    folder = f"cache/{dataset}/wan/{SIZE}"
    paths = [f"{folder}/{stem}_{name}_wan.safetensors" for name in latents]
    for path in paths:
        frames = 2 if "-005_" in path else 1
        place = root / path
        musubi_world.put_latents(place, size=(64, 64), latent=(frames, 8, 8))
        name = f"latents_{frames}x8x8_bfloat16"
        tensor = torch.full((16, frames, 8, 8), float(mark), dtype=torch.bfloat16)
        save_file({name: tensor}, place, {"architecture": "wan", "width": "64", "height": "64"})
    variants = []
    for number in range(texts):
        part = f"text.{number}@{SIZE}" if number else SIZE
        variants.append(f"cache/{dataset}/wan/{part}/{stem}_wan_te.safetensors")
        place = root / variants[-1]
        place.parent.mkdir(parents=True, exist_ok=True)
        embedding = torch.ones(number + 1, 4096, dtype=torch.bfloat16)
        metadata = {"architecture": "wan", "caption1": f"text {number}"}
        save_file({"varlen_t5_bfloat16": embedding}, place, metadata)
    return {
        "dataset": dataset,
        "stem": stem,
        "source": f"data/{dataset}/{stem}.png",
        "caption": None,
        "control": None,
        "repeats": 1,
        "latents": {SIZE: paths},
        "text": {SIZE: variants[0]},
        "texts": [f"text {number}" for number in range(texts)],
        **({"variants": {SIZE: variants}} if texts > 1 else {}),
    }


def make_order(root: Path) -> MusubiOrder:
    order = musubi_world.make_run(root, tuner=root / "musubi-tuner")
    several = {"variants": 3, "shuffle_caption": True}
    settings: dict[str, Any] = {"path": "data/cats"}
    datasets = {
        "pictures": {**settings, "captions": several, "num_repeats": 2},
        "films": {**settings, "target_frames": [1, 5], "captions": {**several, "variants": 2}},
        "single": settings,
    }
    rows = [
        put(root, "pictures", "a_cat_00000-005", ["0064x0064"], 3, 1),
        put(root, "pictures", "cat", ["0064x0064"], 3, 2),
        put(
            root,
            "films",
            "old_film_0064x0064",
            ["00000-001_0064x0064", "00003-005_0064x0064"],
            2,
            3,
        ),
        put(root, "single", "b_dog", ["0064x0064"], 1, 4),
    ]
    (root / "runs/cats/manifest.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in rows))
    return order.model_copy(
        update={"datasets": {name: Dataset.model_validate(x) for name, x in datasets.items()}}
    )


def test_each_text_of_an_item_is_trained_on_with_its_latents(
    tmp_path: Path, trainer: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trainer("musubi-tuner", "wan_train_network.py")
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    order = make_order(root)
    changes = deploy(order)
    assert changes is not None and changes.linked == 2 * 3 * 2 + 2 * (2 + 1)
    again = deploy(order)
    assert again is not None and again.linked == 0
    atomic.write(root / "dataset.toml", training_toml(order).encode())
    environment = {**found.environment(), "CUDA_VISIBLE_DEVICES": ""}
    pictures, films, single = answer_of(PYTHON, "-c", SCRIPT, "dataset.toml", **environment)
    seen = Counter((mark, tokens) for mark, tokens, _ in pictures)
    assert seen == {(mark, tokens): 2 for mark in (1.0, 2.0) for tokens in (1, 2, 3)}
    clips = Counter((mark, tokens, shape[1]) for mark, tokens, shape in films)
    assert clips == {(3.0, tokens, frames): 1 for tokens in (1, 2) for frames in (1, 2)}
    assert [each[:2] for each in single] == [[4.0, 1]]
