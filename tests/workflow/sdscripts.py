"""A tiny model of sd-scripts' kind, and pictures of several sizes to encode with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sdscripts_world
import torch
import world
from project import Project
from safetensors.torch import save_file

SIZES = {
    "ant": (200, 120),
    "bee": (64, 64),
    "sub/cat": (40, 90),
    "dog": (130, 70),
    "eel": (300, 300),
    "sub/fox": (64, 64),
}
CAPTIONS = dict(zip(SIZES, world.CAPTIONS.values(), strict=True))


def make_dataset(folder: Path) -> None:
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        world.draw(folder / f"{stem}.png", number, SIZES[stem])
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")


def config(architecture: str = "sd1", **model: Any) -> dict[str, Any]:
    """A run of two resolutions; `model` changes its model's section."""
    values = {
        "architecture": architecture,
        "layout": "sdscripts",
        "vae": "models/micro/vae",
        "text": ["models/micro/text_encoder"],
        **model,
    }
    dataset = {"path": "data/shapes", "fit": "bucket", "min_bucket_reso": 64}
    return {
        "datasets": {"shapes": dataset},
        "models": {"tiny": values},
        "runs": {"tiny": {"datasets": ["shapes"], "model": "tiny", "resolutions": [64, 128]}},
    }


def make_xl(folder: Path, model: Path, texts: Path) -> Project:
    """Make the same of SDXL, with two text encoders and two texts of each item."""
    places = [str(texts / kind / "text_encoder") for kind in ("clip", "big")]
    values = config("sdxl", text=places)
    values["datasets"]["shapes"]["captions"] = {
        "variants": 2,
        "caption_separator": " ",
        "shuffle_caption": True,
    }
    return make(folder, model, values)


def with_trainer(project: Project, **settings: Any) -> Path:
    """Give the run a trainer, and the project an sd-scripts that is none."""
    trainer = {"kind": "sdscripts", "max_train_epochs": 1, **settings}
    folder = sdscripts_world.stand_in(project.folder / "sd-scripts")
    network = {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(2, 2)}
    save_file(network, project / "models/base.safetensors")
    values = project.config
    values["runs"]["tiny"]["trainer"] = trainer
    values["models"]["tiny"]["checkpoint"] = "models/base.safetensors"
    project.config = {**values, "sd_scripts": {"path": "sd-scripts"}}
    return folder


def make(folder: Path, model: Path, values: dict[str, Any] | None = None) -> Project:
    """Make a project with a micro model and six pictures, two of them in a sub-folder."""
    project = Project.make(folder, config() if values is None else values, model)
    make_dataset(project / "data/shapes")
    return project
