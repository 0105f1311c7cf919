"""Small projects of each kind, and the edits between the commands whose output test_net.py pins."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import fast_tuner
import sdscripts_world
import strategies_world
import world
import yaml
from latentmake.config.architectures import MUSUBI
from project import ROOT, Project

GIVEN = (".snakemake", ".latentmake", "config", "data", "models", "musubi-tuner", "sd-scripts")
"""Folders of a project that no command makes, or whose files are no promise."""


# -- commands that edit a project -----------------------------------------------------------------


def write(project: Project, name: str, *lines: str) -> None:
    (project / name).write_text("\n".join(lines), encoding="utf-8")


def draw(project: Project, name: str, number: str, width: str, height: str) -> None:
    world.draw(project / name, int(number), (int(width), int(height)))


def remove(project: Project, *patterns: str) -> None:
    for pattern in patterns:
        for path in list(project.folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def rename(project: Project, pattern: str, stem: str) -> None:
    for path in list(project.folder.glob(pattern)):
        path.rename(path.with_name(f"{stem}{path.suffix}"))


def copy(project: Project, name: str, to: str) -> None:
    shutil.copyfile(project / name, (project / name).with_name(to))


def damage(project: Project, name: str) -> None:
    data = bytearray((project / name).read_bytes())
    data[-1] ^= 255
    (project / name).write_bytes(data)


def setting(project: Project, place: str, value: str) -> None:
    config = section = project.config
    *places, key = place.split(".")
    for each in places:
        section = section[each]
    section[key] = yaml.safe_load(value)
    project.config = config


EDITS = (write, draw, remove, rename, copy, damage, setting)


# -- images, encoded and trained here -------------------------------------------------------------


SAMPLES = {"prompts": ["a red circle"], "num_inference_steps": 1, "guidance_scale": 1}
# So much that each sample picture differs from the one before on any machine.
TRAINER = {"kind": "sd", "rank": 2, "steps": 2, "learning_rate": 0.1, "samples": SAMPLES}


def make_images(folder: Path, micro: Path) -> Project:
    values = world.config()
    shuffled = {"variants": 2, "shuffle_caption": True, "caption_separator": " "}
    values["datasets"]["shapes"]["captions"] = shuffled
    values["datasets"]["listed"] = {"path": "data/listed.jsonl", "num_repeats": 2, "fit": "bucket"}
    values["models"]["micro"]["ai_training"] = {"latents": ".img_sdxl", "text": ".txt_clipl"}
    values["runs"]["tiny"] |= {"datasets": ["shapes", "listed"], "trainer": TRAINER}
    values["runs"]["small"] = {"datasets": ["listed"], "model": "micro", "resolutions": [16]}
    project = Project.make(folder, values, micro)
    world.make_dataset(project / "data/shapes")
    world.keep(project / "data/shapes", 4)
    rows = []
    for number, size in enumerate([(48, 24), (24, 40)]):
        world.draw(project / f"data/pictures/{number}.png", 20 + number, size)
        row = {"image_path": f"pictures/{number}.png", "caption": f"picture {number}"}
        rows.append(json.dumps({**row, "rating": number}))
    write(project, "data/listed.jsonl", *rows)
    return project


# -- clips and pictures of Wan, trained here -------------------------------------------------------


def make_wan(folder: Path, micro: Path) -> Project:
    names = {"vae": "vae", "text": "text_encoder", "dit": "transformer"}
    model = {key: f"models/tiny-wan/{name}" for key, name in names.items()}
    trainer = {"kind": "wan", "rank": 2, "steps": 2, "mixed_precision": "no"}
    run = {"datasets": ["clips", "pictures"], "model": "tiny-wan", "resolutions": [[64, 48]]}
    drawn = {"prompts": ["calm waves"], "num_inference_steps": 1}
    clips = {"path": "data/clips", "target_frames": [5], "fit": "crop"}
    values = {
        "datasets": {"clips": clips, "pictures": {"path": "data/pictures"}},
        "models": {"tiny-wan": {"task": "t2v-1.3B", **model}},
        "runs": {
            "waves": {**run, "trainer": trainer, "generate": drawn, "validation": {"items": 1}},
            "tuned": {**run, "datasets": ["clips"]},
        },
    }
    project = Project.make(folder, values, ROOT / "data/tiny-wan")
    for place, stems in {
        "clips": ("calm_blue_grey", "high_blue_pink", "rolling_blue_yellow", "choppy_blue_orange"),
        "pictures": ("calm_teal_yellow",),
    }.items():
        (project / f"data/{place}").mkdir(parents=True)
        for path in (ROOT / f"data/waves/{place}").iterdir():
            if path.stem in stems:
                shutil.copy2(path, project / f"data/{place}/{path.name}")
    return project


# -- Qwen-Image-Edit, whose caches musubi-tuner's scripts make -------------------------------------


def make_scripts(folder: Path, micro: Path) -> Project:
    dit = "transformer_blocks.0.img_mod.1.weight"
    tensors = {"vae": "encoder", "text": "embedding", "dit": dit}
    models = folder.parent / "models"
    fast_tuner.write_weights(models, **tensors)
    weights = {name: f"models/models/{name}.safetensors" for name in tensors}
    values = fast_tuner.config("qwen_image_edit", task="edit-2509", **weights)
    values["datasets"]["shapes"]["control_directory"] = "data/control"
    trainer = {"kind": "musubi", "max_train_epochs": 1, "network_dim": 4}
    values["runs"]["tiny"] |= {"trainer": trainer}
    project = Project.make(folder, {**values, "publish": {"path": "out"}}, models)
    fast_tuner.install(project / "musubi-tuner", MUSUBI["qwen_image_edit"])
    captions = {stem: world.CAPTIONS[stem] for stem in ("ant", "bee", "cat")}
    fast_tuner.write_pictures(project / "data/shapes", captions, (160, 96))
    fast_tuner.write_pictures(project / "data/control", captions, (96, 96))
    return project


# -- Lumina, whose caches the classes of sd-scripts make -------------------------------------------


def make_strategies(folder: Path, micro: Path) -> Project:
    project = Project.make(folder, {})
    with contextlib.chdir(folder):
        values = strategies_world.make()
        sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False)
    values["runs"]["tiny"]["trainer"] = {"kind": "sdscripts", "max_train_epochs": 1}
    project.config = {**values, "publish": {"path": "out"}}
    return project


WORLDS = {
    "images": make_images,
    "clips": make_wan,
    "scripts": make_scripts,
    "sdscripts": make_strategies,
}
