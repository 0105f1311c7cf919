"""sd-scripts' own code, killed twice and resumed: a small random Stable Diffusion on a CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import world
from conftest import steps
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from latentmake.base.errors import TrainingError
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.models import Model
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.sdscripts.backend import SdScripts as Trainer
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from safetensors.torch import load_file
from transformers import CLIPTextModel

pytestmark = pytest.mark.real_trainer

WORK = Path("runs/cats/output")
LOG = Path("logs/train.log")
TOKENIZER = "openai_clip-vit-large-patch14"  # as its cache of tokenizers names it


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


def make_run(root: Path, program: Installation, **settings: object) -> Path:
    """Write pictures, captions, latents, manifest, lock and order; return the order's path.

    `settings` are further ones of the trainer.
    """
    make_model(root / "models")
    rows = []
    for number, stem in enumerate(("ant", "bee", "cat")):
        world.draw(root / f"data/{stem}.png", number, (64, 64))
        (root / f"data/{stem}.txt").write_text(f"a {stem}")
        latents = root / f"cache/{stem}_0064x0064_sd.npz"
        latents.parent.mkdir(exist_ok=True)
        np.savez(
            latents,
            latents=np.full((4, 8, 8), number / 4, dtype=np.float32),
            original_size=np.array([64, 64]),
            crop_ltrb=np.array([0.0, 0.0, 64.0, 64.0]),
        )
        row = {"dataset": "cats", "stem": stem, "source": f"data/{stem}.png", "repeats": 1}
        row |= {"latents": {"64": f"cache/{latents.name}"}, "text": None}
        rows.append({**row, "caption": f"data/{stem}.txt"})
    (root / "manifest.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "dataset.lock").write_text(json.dumps({"digest": "d"}))
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
    order = SdScriptsOrder(
        run="cats",
        manifest="manifest.jsonl",
        lock="dataset.lock",
        output="runs/cats",
        datasets={"cats": Dataset(path="data")},
        resolutions=[(64, 64)],
        model_name="sd",
        model=Model.model_validate(
            {
                "vae": "models/sd/vae",
                "text": "models/sd/text_encoder",
                "architecture": "sd1",
                "layout": "sdscripts",
                "checkpoint": "models/sd",
            }
        ),
        trainer=SdScriptsTrainer.model_validate({"kind": "sdscripts", **trainer}),
        program=ExternalProgram(path=os.fspath(program.folder), venv=os.fspath(program.python)),
        publish=Publish(),
    )
    path = root / "order.sdscripts.json"
    path.write_text(order.model_dump_json())
    return path


def test_a_training_killed_twice_is_resumed_by_number_and_ends_with_its_last_epoch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Callable[[str, str], Installation],
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    order = make_run(root, program)

    def launch() -> None:
        Trainer().train(order, log=LOG, receipt=Path("runs/cats/trained.json"))

    for epoch in (2, 3):
        monkeypatch.setenv("DIES_AFTER", f"cats-{epoch:06d}-state")
        with pytest.raises(TrainingError):
            launch()
        assert steps(WORK / f"cats-{epoch:06d}-state") == 3 * epoch, LOG.read_text()
    monkeypatch.delenv("DIES_AFTER")
    launch()
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Callable[[str, str], Installation],
    module: str | None,
    arguments: list[str],
    mark: str,
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    if module is not None and program.modules([module])[module] is None:
        pytest.skip(f"{program.python} lacks {module}: set LATENTMAKE_TRAINERS_PYTHON")
    monkeypatch.chdir(tmp_path)
    other = {"network_module": module, "network_args": arguments, "max_train_epochs": 1}
    order = make_run(tmp_path, program, **other, samples={})
    for _ in range(2):
        Trainer().train(order, log=LOG, receipt=Path("runs/cats/trained.json"))
    assert "already trained on exactly this" in LOG.read_text()
    assert any(name.endswith(mark) for name in load_file("runs/cats/cats.safetensors"))
