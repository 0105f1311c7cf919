"""sd-scripts' own code trains a small random Stable Diffusion on a CPU, from what we deploy."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from conftest import Find, said_by, steps
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from item_world import inputs_of
from latentmake.base.errors import TrainingError
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram
from latentmake.config.root import Validation
from latentmake.config.trainers import SdTrainer
from latentmake.formats.safetensors import read_head
from latentmake.pages.curves import read_curves
from latentmake.pages.following import training_section
from latentmake.plan.manifest import ManifestOrder, Member
from latentmake.runs.rows import write_manifest
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.loop.recipe import BatchOrder
from latentmake.trainers.sdscripts.backend import SdScripts as Trainer
from latentmake.trainers.sdscripts.deploy import deploy
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from order_world import silent
from safetensors.torch import load_file
from sdscripts_world import order_of
from trainer_world import make_latents, make_text
from transformers import CLIPTextModel

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

WORK = Path("runs/cats/output")
WEIGHTS = Path("runs/cats/cats.safetensors")
LOG = Path("logs/train.log")
TOKENIZER = "openai_clip-vit-large-patch14"  # as its cache of tokenizers names it
# The two halves of a dataset, to train on and held out, as sd-scripts finds them.
DATASETS = """# preloaded
import argparse, json, sys
from types import SimpleNamespace
import torch, transformers
sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
from library import config_util, strategy_base, strategy_sd, train_util
parser = argparse.ArgumentParser()
train_util.add_dataset_arguments(parser, True, True, True)
train_util.add_training_arguments(parser, True)
args = parser.parse_args(sys.argv[2:])
train_util.prepare_dataset_args(args, True)
caching = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False)
strategy_base.LatentsCachingStrategy.set_strategy(caching)
user = config_util.load_user_config(sys.argv[1])
sanitizer = config_util.ConfigSanitizer(True, True, False, True)
blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, args)
groups = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
"""


@pytest.fixture
def program(trainer: Find) -> Installation:
    return trainer("sd-scripts", "train_network.py")


def make_model(folder: Path) -> None:
    world.make_model(folder / "parts")
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(folder / "parts/vae"),
        text_encoder=CLIPTextModel.from_pretrained(folder / "parts/text_encoder"),
        tokenizer=world.make_tokenizer(),
        unet=unet,
        scheduler=DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            clip_sample=False,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "sd")
    world.make_tokenizer().save_pretrained(folder / "tokenizers" / TOKENIZER)


def put(
    source: str, caption: str, size: tuple[int, int] = (64, 64), /, **changes: Any
) -> dict[str, Any]:
    """Write a picture, its caption and its latents; return its row of the manifest."""
    path = Path(source)
    world.draw(path, len(source), size)
    path.with_suffix(".txt").write_text(caption)
    latents = Path(f"cache/{path.stem}_{size[0]:04d}x{size[1]:04d}_sd.npz")
    latents.parent.mkdir(exist_ok=True)
    np.savez(
        latents,
        latents=np.full((4, 8, 8), len(source) / 16, dtype=np.float32),
        original_size=np.array(size),
        crop_ltrb=np.array([0.0, 0.0, 64.0, 64.0]),
    )
    row = {"dataset": "cats", "stem": path.stem, "source": source, "repeats": 1, "text": None}
    row |= {"latents": {"64": str(latents)}, "caption": str(path.with_suffix(".txt"))}
    return row | changes


def append(order: SdScriptsOrder, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to the manifest."""
    with Path(order.manifest).open("a") as manifest:
        manifest.writelines(f"{json.dumps(row)}\n" for row in rows)


def make_run(program: Installation, **settings: object) -> SdScriptsOrder:
    """Write a model, three pictures with captions and latents, manifest and lock; return the order.

    `settings` are further ones of the trainer.
    """
    make_model(Path("models"))
    trainer = {
        "network_dim": 2,
        "network_train_unet_only": True,
        "lr_scheduler": "cosine",
        "max_train_epochs": 4,
        "save_every_n_epochs": 1,
        "mixed_precision": "no",
        "max_data_loader_n_workers": 0,
        "arguments": ["--tokenizer_cache_dir", "models/tokenizers"],
        "samples": {"prompts": ["a cat"], "num_inference_steps": 1, "every": 4},
        **settings,
    }
    model = {"vae": "models/sd/vae", "text": "models/sd/text_encoder", "checkpoint": "models/sd"}
    order = order_of(
        "sd1",
        trainer=trainer,
        model=model,
        datasets={"cats": Dataset(path="data")},
        resolutions=[(64, 64)],
        program=ExternalProgram(path=os.fspath(program.folder), venv=os.fspath(program.python)),
    )
    Path(order.lock).write_text(json.dumps({"digest": "d"}))
    append(order, [put(f"data/{stem}.png", f"a {stem}") for stem in ("ant", "bee", "cat")])
    return order


def train(order: SdScriptsOrder) -> None:
    Trainer().train(order.write(), log=LOG, receipt=Path("runs/cats/trained.json"))


def test_a_training_killed_twice_is_resumed_by_number_and_ends_with_its_last_epoch(
    monkeypatch: pytest.MonkeyPatch, program: Installation
) -> None:
    order = make_run(program)
    for epoch in (2, 3):
        monkeypatch.setenv("DIES_AFTER", f"cats-{epoch:06d}-state")
        with pytest.raises(TrainingError):
            train(order)
        assert steps(WORK / f"cats-{epoch:06d}-state") == 3 * epoch, LOG.read_text()
    monkeypatch.delenv("DIES_AFTER")
    train(order)
    assert "cats-000003-state, 3 epochs are done" in LOG.read_text()
    assert steps(WORK / "cats-state") == 4 * 3
    assert len([*(WORK / "sample").glob("*.png")]) >= 4
    scheduler = torch.load(WORK / "cats-state/scheduler.bin", weights_only=True)
    assert scheduler["_last_lr"] == pytest.approx([0.0], abs=1e-9)  # the end of the whole cosine


@pytest.mark.parametrize(
    ("module", "arguments", "mark"),
    [
        (None, ["conv_dim=2", "conv_alpha=1"], "resnets_0_conv1.lora_up.weight"),
        ("lycoris.kohya", ["algo=loha", "preset=attn-mlp"], ".hada_w1_a"),
    ],
)
def test_another_network_is_trained_and_accepted(
    program: Installation, module: str | None, arguments: list[str], mark: str
) -> None:
    if module is not None and program.modules([module])[module] is None:
        pytest.skip(f"{program.python} lacks {module}: set LATENTMAKE_TRAINERS_PYTHON")
    other = {"network_module": module, "network_args": arguments, "max_train_epochs": 1}
    order = make_run(program, **other, samples={})
    for _ in range(2):
        train(order)
    assert "already trained on exactly this" in LOG.read_text()
    assert any(name.endswith(mark) for name in load_file(WEIGHTS))


# -- regularisation images ------------------------------------------------------------------------

# Repeats and number of images of two datasets, then of two with regularisation images.
CASES = {
    "too few": [(3, 5), (2, 2), (1, 2), (2, 3)],
    "too many": [(1, 4), (1, 1), (1, 9), (1, 2)],
    "more in the first round": [(1, 4), (1, 1), (3, 3), (1, 2)],
    "as many": [(2, 2), (1, 2), (1, 5), (1, 1)],
}
WEIGHT = 0.25
# An epoch as its own dataset gives it, with latents and texts that its caches would hold.
EPOCH = f"""{DATASETS}
(dataset,) = groups[0].datasets
dataset.text_encoder_output_caching_strategy = SimpleNamespace(is_partial=False)
for info in dataset.image_data.values():
    info.latents = torch.zeros(4, 8, 8)
    info.latents_original_size, info.latents_crop_ltrb = (64, 64), (0, 0, 64, 64)
    info.text_encoder_outputs = [torch.zeros(1)]
seen = []
for number in range(len(dataset)):
    batch = dataset[number]
    seen += zip(batch["captions"], batch["loss_weights"].tolist())
print(json.dumps(seen))
"""


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_the_trainer_sd_shows_the_same_images_as_often_with_the_same_weights(
    tmp_path: Path, program: Installation, counts: list[tuple[int, int]]
) -> None:
    names = dict(zip("dcba", counts, strict=True))
    latents, text = make_latents(Path("latents"), 8, 8, 0), make_text(Path("text"), 0)
    members, subsets = [], []
    for name, (repeats, count) in names.items():
        for number in range(count):
            source = f"{name}/{name}{number}.png"
            put(source, f"{name}{number}")
            item = inputs_of(f"{name}{number}", source)
            members.append(Member(name, item, {"64": [(latents, "k")], "text": [(text, "k")]}))
        subset = {"image_dir": str(tmp_path / name), "caption_extension": ".txt"}
        subsets.append({**subset, "num_repeats": repeats, "is_reg": name in "ab"})
    order = ManifestOrder(
        run="tiny", model="m", repeats={name: repeats for name, (repeats, _) in names.items()},
        skip=[], items=members, faults={}, orphans=[], planned=1, is_reg=["a", "b"],
    )  # fmt: skip
    write_manifest(order, [], Path("runs/tiny"), silent)
    caches = Caches(read_items(Path("runs/tiny/manifest.jsonl")), prior_loss_weight=WEIGHT)
    batches = BatchOrder(caches, SdTrainer(kind="sd", train_batch_size=2))
    ours: Counter[tuple[str, float]] = Counter()
    for indices in batches.batches(0, 1, batches.batches_per_epoch):
        weights = caches.batch(indices).weights
        assert weights is not None
        stems = (caches.rows[index].stem for index in indices)
        ours.update(zip(stems, weights.tolist(), strict=True))
    settings = tmp_path / "datasets.json"
    dataset = {"resolution": 64, "batch_size": 2, "subsets": subsets}
    settings.write_text(json.dumps({"datasets": [dataset]}))
    theirs = said_by(program, EPOCH, settings, "--prior_loss_weight", WEIGHT)
    assert ours == Counter(map(tuple, json.loads(theirs)))
    assert {weight for _, weight in ours} == {1.0, WEIGHT}


def test_a_training_takes_the_regularisation_images_of_the_folder_that_we_write(
    program: Installation,
) -> None:
    further = {"max_train_epochs": 1, "save_every_n_epochs": None, "prior_loss_weight": WEIGHT}
    order = make_run(program, **further)
    regular = {"dataset": "reg", "is_reg": True}
    # A name begins another one, an image has another size, and a caption is empty.
    append(order, [put("reg/an.png", "an animal", **regular)])
    append(order, [put("reg/an_imal.png", "", (80, 72), **regular)])
    datasets = {**order.datasets, "reg": Dataset(path="reg", is_reg=True, empty_caption="allow")}
    train(order.model_copy(update={"datasets": datasets}))
    said = read_head(WEIGHTS).metadata
    assert (said["ss_num_train_images"], said["ss_num_reg_images"]) == ("3", "2")
    assert said["ss_num_batches_per_epoch"] == said["ss_steps"] == "6"
    assert said["ss_prior_loss_weight"] == str(WEIGHT)
    (dataset,) = json.loads(said["ss_datasets"])
    assert dataset["tag_frequency"]["reg_64"] == {"an animal": 1}


# -- items that are held out ----------------------------------------------------------------------

HELD_OUT = {"ant": ((64, 64), "a held-out ant"), "an": ((80, 72), ""), "anteater": ((72, 96), "b")}
ITEMS = f"""{DATASETS}
print(json.dumps([
    sorted([x.caption, list(x.image_size)] for each in group.datasets
           for x in each.image_data.values())
    for group in groups
]))
"""


def test_the_loss_of_held_out_items_is_computed_and_shown_and_none_is_trained_on(
    tmp_path: Path, program: Installation
) -> None:
    order = make_run(program, max_train_epochs=2, samples={})
    for stem, (size, caption) in HELD_OUT.items():  # a name begins another one
        held = {"stem": f"more/{stem}", "validation": True} | ({} if caption else {"caption": None})
        append(order, [put(f"more/{stem}.png", caption, size, **held)])
    other = order.datasets["cats"].model_copy(update={"path": "none"})  # which has none held out
    order = order.model_copy(
        update={
            "validation": Validation(items=3, every=2),
            "datasets": {**order.datasets, "dogs": other},
        }
    )
    deploy(order)
    toml = tmp_path / "runs/cats" / order.toml
    trained, held_out = json.loads(said_by(program, ITEMS, toml))
    assert trained == [[f"a {stem}", [64, 64]] for stem in ("ant", "bee", "cat")]
    assert held_out == sorted([caption, list(size)] for size, caption in HELD_OUT.values())
    train(order)
    metadata = read_head(WEIGHTS).metadata
    assert (metadata["ss_num_train_images"], metadata["ss_num_validation_images"]) == ("3", "3")
    (events,) = Path("runs/cats/logs").rglob("events.out.tfevents*")
    curves = read_curves(events.parent)
    assert [*curves["loss/validation/step_average"][0]] == [2, 4, 6]
    assert [*curves["loss/validation/epoch_average"][0]] == [2]  # the last one
    assert [name for name, _ in training_section("cats")["pictures"]] == ["Curves"]
