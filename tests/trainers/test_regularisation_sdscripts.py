"""Regularisation images: sd-scripts' own code shows and weights them as the trainer sd does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import world
from conftest import said_by
from item_world import inputs_of
from latentmake.config.datasets import Dataset
from latentmake.config.trainers import SdTrainer
from latentmake.formats.safetensors import read_head
from latentmake.plan.manifest import ManifestOrder, Member
from latentmake.runs.order import read_order
from latentmake.runs.rows import write_manifest
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.loop.recipe import BatchOrder
from latentmake.trainers.sdscripts.backend import SdScripts as Trainer
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from order_world import silent
from test_resume_sdscripts import make_run
from trainer_world import make_latents, make_text

pytestmark = pytest.mark.real_trainer

Seen = Counter[tuple[str, float]]
"""Name of an image and weight of its loss -> how often an epoch shows it."""
WEIGHT = 0.25
# Repeats and number of images of two datasets, then of two with regularisation images.
CASES = {
    "too few": [(3, 5), (2, 2), (1, 2), (2, 3)],
    "too many": [(1, 4), (1, 1), (1, 9), (1, 2)],
    "more in the first round": [(1, 4), (1, 1), (3, 3), (1, 2)],
    "as many": [(2, 2), (1, 2), (1, 5), (1, 1)],
}
# Each epoch as its own dataset gives it, with latents and texts that its caches would hold.
SCRIPT = """# preloaded
import argparse, json, os, sys
from types import SimpleNamespace
import torch, transformers
sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
from library import config_util, train_util
parser = argparse.ArgumentParser()
train_util.add_dataset_arguments(parser, True, True, True)
train_util.add_training_arguments(parser, True)
args = parser.parse_args(["--prior_loss_weight", sys.argv[1]])
train_util.prepare_dataset_args(args, True)
found = []
for file in sys.argv[2:]:
    user = config_util.load_user_config(file)
    sanitizer = config_util.ConfigSanitizer(True, True, False, True)
    blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, args)
    group, _ = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    seen = []
    for dataset in group.datasets:
        dataset.text_encoder_output_caching_strategy = SimpleNamespace(is_partial=False)
        for info in dataset.image_data.values():
            info.latents = torch.zeros(4, 8, 8)
            info.latents_original_size, info.latents_crop_ltrb = (64, 64), (0, 0, 64, 64)
            info.text_encoder_outputs = [torch.zeros(1)]
        for number in range(len(dataset)):
            batch = dataset[number]
            seen += zip(batch["captions"], batch["loss_weights"].tolist())
    found.append(seen)
print(json.dumps(found))
"""


def shown_by_sd(names: dict[str, int], regular: list[str], images: dict[str, list[str]]) -> Seen:
    """Return what an epoch of the trainer sd shows of datasets with these repeats and images."""
    members = []
    for name in names:
        for number, stem in enumerate(images[name]):
            latents = make_latents(Path(f"cache/{stem}.latents.safetensors"), 8, 8, number)
            text = make_text(Path(f"cache/{stem}.text.safetensors"), number)
            item = inputs_of(stem, f"{name}/{stem}.png")
            members.append(Member(name, item, {"64": [(latents, stem)], "text": [(text, stem)]}))
    order = ManifestOrder(
        run="tiny",
        model="m",
        repeats=names,
        skip=[],
        items=members,
        faults={},
        orphans=[],
        planned=1,
        is_reg=regular,
    )
    write_manifest(order, [], Path("runs/tiny"), silent)
    rows = read_items(Path("runs/tiny/manifest.jsonl"))
    caches = Caches(rows, prior_loss_weight=WEIGHT)
    made = BatchOrder(caches, SdTrainer(kind="sd", train_batch_size=2))
    seen: Seen = Counter()
    for indices in made.batches(0, 1, made.batches_per_epoch):
        batch = caches.batch(indices)
        assert batch.weights is not None
        stems = (caches.rows[index].stem for index in indices)
        seen.update(zip(stems, batch.weights.tolist(), strict=True))
    return seen


def test_an_epoch_shows_the_same_images_as_often_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Callable[[str, str], Installation]
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    monkeypatch.chdir(tmp_path)
    files, ours = [], []
    for number, counts in enumerate(CASES.values()):
        names = {f"{number}{'dcba'[place]}": counts[place][0] for place in range(len(counts))}
        images, blocks = {}, ["[[datasets]]\nresolution = 64\nbatch_size = 2\n"]
        for place, (name, (repeats, count)) in enumerate(zip(names, counts, strict=True)):
            images[name] = [f"{name}_{each:02d}" for each in range(count)]
            for stem in images[name]:
                world.draw(Path(f"{name}/{stem}.png"), 1, (64, 64))
                Path(f"{name}/{stem}.txt").write_text(stem)
            is_reg = str(place > 1).lower()
            blocks.append(
                f'[[datasets.subsets]]\nimage_dir = "{tmp_path / name}"\nis_reg = {is_reg}\n'
                f'num_repeats = {repeats}\ncaption_extension = ".txt"\n'
            )
        files.append(tmp_path / f"{number}.toml")
        files[-1].write_text("".join(blocks))
        ours.append(shown_by_sd(names, sorted([*names][2:]), images))
    found = json.loads(said_by(program, SCRIPT, WEIGHT, *files))
    theirs = [Counter(map(tuple, seen)) for seen in found]
    for name, own, their in zip(CASES, ours, theirs, strict=True):
        assert own == their, name
        assert {weight for _, weight in own} == {1.0, WEIGHT}


def test_a_training_takes_the_regularisation_images_of_the_folder_that_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Callable[[str, str], Installation]
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    monkeypatch.chdir(tmp_path)
    order = read_order(make_run(tmp_path, program), SdScriptsOrder)
    rows = [json.loads(line) for line in Path(order.manifest).read_text().splitlines()]
    # A name begins another one, an image has another size, and a caption is empty.
    regular: dict[str, tuple[tuple[int, int], str]] = {
        "an": ((64, 64), "an animal"),
        "an_imal": ((80, 72), ""),
    }
    for stem, (size, caption) in regular.items():
        world.draw(Path(f"reg/{stem}.png"), 5, size)
        Path(f"reg/{stem}.txt").write_text(caption)
        latents = f"cache/{stem}_{size[0]:04d}x{size[1]:04d}_sd.npz"
        np.savez(
            latents,
            latents=np.zeros((4, 8, 8), dtype=np.float32),
            original_size=np.array(size),
            crop_ltrb=np.array([0.0, 0.0, 64.0, 64.0]),
        )
        row = {**rows[0], "dataset": "reg", "stem": stem, "source": f"reg/{stem}.png"}
        row |= {"latents": {"64": latents}, "caption": f"reg/{stem}.txt", "is_reg": True}
        rows.append(row)
    Path(order.manifest).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    datasets = {**order.datasets, "reg": Dataset(path="reg", is_reg=True, empty_caption="allow")}
    settings: dict[str, Any] = {
        "max_train_epochs": 1,
        "save_every_n_epochs": None,
        "prior_loss_weight": WEIGHT,
    }
    order = order.model_copy(
        update={
            "datasets": datasets,
            "trainer": order.trainer.model_copy(update=settings),
        }
    )
    Trainer().train(order.write(), log=Path("train.log"), receipt=Path("trained.json"))
    said = read_head(Path("runs/cats/cats.safetensors")).metadata
    assert (said["ss_num_train_images"], said["ss_num_reg_images"]) == ("3", "2")
    assert said["ss_num_batches_per_epoch"] == said["ss_steps"] == "6"
    assert said["ss_prior_loss_weight"] == str(WEIGHT)
    (dataset,) = json.loads(said["ss_datasets"])
    assert dataset["tag_frequency"]["reg_64"] == {"an animal": 1}
