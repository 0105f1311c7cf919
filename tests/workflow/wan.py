"""A tiny Wan model in the original key format, and pictures and videos to encode with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import musubi_world
import torch
import wan_world
import world
from project import Project
from safetensors.torch import save_file

SIZES = {
    "ant": (200, 120),
    "bee": (64, 64),
    "cat": (40, 90),
    "dog": (130, 70),
    "eel": (300, 300),
    "fox": (64, 64),
}


def make_model(folder: Path) -> None:
    """Write VAE, umT5, CLIP and a stand-in for the DiT, as a user would have downloaded them."""
    wan_world.write_wan_vae(folder)
    wan_world.write_umt5(folder)
    wan_world.write_clip_vision(folder)
    write_dit(folder / "wan2.1_t2v_1.3B_bf16.safetensors")


def write_dit(path: Path) -> None:
    """Write a stand-in for the network that is trained."""
    dit = {
        "patch_embedding.weight": torch.ones(4, 16, 1, 2, 2, dtype=torch.bfloat16),
        "blocks.0.self_attn.q.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        "blocks.0.cross_attn.k.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        "head.modulation": torch.ones(1, 2, 4, dtype=torch.bfloat16),
    }
    save_file(dit, path)


def make_dataset(folder: Path) -> None:
    for number, (stem, caption) in enumerate(world.CAPTIONS.items()):
        world.draw(folder / f"{stem}.png", number, SIZES[stem])
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")


def config(**model: Any) -> dict[str, Any]:
    return {
        "datasets": {"shapes": {"path": "data/shapes", "fit": "bucket"}},
        "models": {
            "wan": {
                "task": "t2v-1.3B",
                "vae": "models/wan/Wan2.1_VAE.pth",
                "text": {
                    "path": str(umt5_file("models/wan")),
                    "tokenizer": "models/wan/tokenizer",
                },
                "dit": "models/wan/wan2.1_t2v_1.3B_bf16.safetensors",
                **model,
            }
        },
        "runs": {
            "tiny": {"datasets": ["shapes"], "model": "wan", "resolutions": [64, 96, [128, 64]]},
        },
    }


def umt5_file(folder: str) -> str:
    return f"{folder}/models_t5_umt5-xxl-enc-bf16.pth"


def make(folder: Path, model: Path, **settings: Any) -> Project:
    """Make a project with the tiny Wan model and six pictures."""
    project = Project.make(folder, config(**settings), model)
    make_dataset(project / "data/shapes")
    return project


def with_trainer(project: Project, **settings: Any) -> Path:
    """Give the run a trainer, and the project a musubi-tuner that is none."""
    trainer = {"kind": "musubi", "max_train_epochs": 1, "network_dim": 4, **settings}
    folder = musubi_world.stand_in(project.folder / "musubi-tuner", own_venv=False)
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    python = str(Path(sys.prefix))
    project.configure(
        lambda values: values.update(musubi_tuner={"path": "musubi-tuner", "venv": python})
    )
    return folder


def inode(path: Path) -> int:
    return path.stat().st_ino


def bash(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script)], env=environment, text=True, capture_output=True, check=False
    )
