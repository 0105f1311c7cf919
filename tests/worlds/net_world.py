"""Small projects of each kind, and the commands whose output test_net.py pins."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fast_tuner
import sdscripts_world
import strategies_world
import world
import yaml
from latentmake.config.musubi import MUSUBI
from project import ROOT, Project

GIVEN = (".snakemake", ".latentmake", "config", "data", "models", "musubi-tuner", "sd-scripts")
"""Folders of a project that no command makes, or whose files are no promise."""


class World(NamedTuple):
    """A project, and commands on it, one a line."""

    make: Callable[[Path, Path], Project]
    targets: str
    words: str
    edits: str
    """What is edited, and the file that is explained after it."""
    trained: str
    """The target that is planned after each edit, and built after the first three."""


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


IMAGES = World(
    make_images,
    targets="""
snakemake -n
snakemake cache/shapes/micro/16/ant.latents.safetensors
snakemake latents_small
snakemake text_small
snakemake caches_tiny
receipts
snakemake train_tiny
snakemake all
snakemake -n all
snakemake cache/shapes/micro/text/ant.text.safetensors
snakemake cache/shapes/micro/16/nobody.latents.safetensors
snakemake generate_tiny
snakemake evaluate_tiny
snakemake publish_tiny
snakemake clips_tiny
snakemake export_small
snakemake -n report_tiny
files
read runs/tiny/manifest.jsonl
read runs/tiny/dataset.lock
read runs/tiny/trained.json
read runs/small/dataset.lock
""",
    words="""
latentmake status
latentmake status --json
latentmake explain data/shapes/ant.png
latentmake explain cache/shapes/micro/16/ant.latents.safetensors --json
latentmake check
latentmake check small --json
latentmake verify
latentmake verify --json
latentmake captions tiny
latentmake captions tiny --json
latentmake report tiny
page reports/report_tiny.html
latentmake compare tiny
page reports/compare_tiny.html
latentmake show cache/shapes/micro/text.1/ant.text.safetensors
latentmake show data/shapes/ant.png
latentmake doctor
latentmake init data/shapes --output new.yaml
read new.yaml
write theirs.toml [[datasets]] 'resolution = 64' [[datasets.subsets]] 'image_dir = "data/shapes"'
latentmake import theirs.toml --architecture sd1
damage cache/shapes/micro/32/ant.latents.safetensors
latentmake verify --repair
latentmake status -v
setting datasets.shapes.captions {}
latentmake prune --json
latentmake prune
latentmake prune --yes
remove cache .latentmake
latentmake adopt small
latentmake status small
latentmake explain data/pictures/0.png
snakemake caches_small
files
""",
    edits="""
write data/shapes/ant.txt 'other words' -> cache/shapes/micro/text.1/ant.text.safetensors
draw data/shapes/cat.png 50 40 36 -> cache/shapes/micro/16/cat.latents.safetensors
remove data/shapes/bee.* -> cache/shapes/micro/16/bee.latents.safetensors
rename data/shapes/dog.* hound -> cache/shapes/micro/32/hound.latents.safetensors
write data/listed.jsonl '{"image_path": "pictures/1.png", "caption": "one"}' -> data/pictures/1.png
setting runs.tiny.trainer.rank 4 -> cache/shapes/micro/32/ant.latents.safetensors
setting runs.tiny.resolutions [16,24] -> cache/shapes/micro/24/ant.latents.safetensors
setting datasets.listed.fit crop -> cache/listed/micro/32/pictures/1.latents.safetensors
""",
    trained="train_tiny",
)


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


CLIPS = World(
    make_wan,
    targets="""
snakemake -n
snakemake clips_waves
snakemake latents_waves
snakemake text_waves
snakemake caches_tuned
snakemake train_waves generate_waves evaluate_waves
snakemake all
snakemake -n all train_waves generate_waves evaluate_waves
snakemake publish_tuned
snakemake export_tuned
receipts
files
read runs/waves/manifest.jsonl
read runs/waves/dataset.lock
read runs/waves/trained.json
read clips/waves/train.jsonl
read runs/waves/generated/index.json
""",
    words="""
latentmake status
latentmake status waves --json
latentmake explain data/clips/calm_blue_grey.mp4
latentmake check
latentmake verify
latentmake captions waves --json
latentmake report waves
page reports/report_waves.html
latentmake compare waves
latentmake init data/clips --model models/tiny-wan --output new.yaml
read new.yaml
setting datasets.clips.fit bucket
latentmake prune -v
""",
    edits="""
write data/clips/calm_blue_grey.txt 'other waves' -> data/clips/calm_blue_grey.mp4
copy data/clips/choppy_blue_orange.mp4 high_blue_pink.mp4 -> data/clips/high_blue_pink.mp4
remove data/clips/rolling* -> data/clips/choppy_blue_orange.mp4
setting runs.waves.trainer.rank 4 -> data/pictures/calm_teal_yellow.png
setting runs.waves.resolutions [[48,32]] -> data/clips/calm_blue_grey.mp4
setting datasets.clips.target_frames [1,9] -> data/clips/calm_blue_grey.mp4
""",
    trained="train_waves generate_waves evaluate_waves",
)


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


TRAINED = """
snakemake -n train_tiny
snakemake latents_tiny
snakemake text_tiny
snakemake train_tiny
snakemake -n all
snakemake publish_tiny
receipts
files
read runs/tiny/manifest.jsonl
read runs/tiny/dataset.lock
read runs/tiny/trained.json
"""
ASKED = """
latentmake status
latentmake check
latentmake verify
latentmake report tiny
page reports/report_tiny.html
latentmake captions tiny --json
latentmake compare tiny
setting runs.tiny.resolutions [128]
latentmake prune
"""

SCRIPTS = World(
    make_scripts,
    targets=TRAINED,
    words=f"latentmake explain data/shapes/ant.png\n{ASKED}",
    edits="""
write data/shapes/ant.txt 'other words' -> data/shapes/ant.txt
draw data/shapes/cat.png 50 40 36 -> cache/shapes/tiny/64/cat_0160x0096_qie.safetensors
remove data/shapes/ant.* -> cache/shapes/tiny/64/ant_0160x0096_qie.safetensors
draw data/control/ant.png 9 96 96 -> data/shapes/ant.png
setting runs.tiny.trainer.network_dim 8 -> cache/shapes/tiny/64/ant_qie_te.safetensors
setting runs.tiny.resolutions [64,128] -> cache/shapes/tiny/128/ant_qie_te.safetensors
setting datasets.shapes.fit crop -> cache/shapes/tiny/64/ant_qie_te.safetensors
""",
    trained="train_tiny",
)


# -- Lumina, whose caches the classes of sd-scripts make -------------------------------------------


def make_strategies(folder: Path, micro: Path) -> Project:
    project = Project.make(folder, {})
    with contextlib.chdir(folder):
        values = strategies_world.make()
        sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False)
    values["runs"]["tiny"]["trainer"] = {"kind": "sdscripts", "max_train_epochs": 1}
    project.config = {**values, "publish": {"path": "out"}}
    return project


STRATEGIES = World(
    make_strategies,
    targets=TRAINED,
    words=f"latentmake explain data/ant.png\n{ASKED}",
    edits="""
write data/ant.txt 'two words' -> data/ant.txt
draw data/cat.png 50 80 64 -> data/cat.png
remove data/bee.* -> data/ant.png
setting runs.tiny.trainer.network_dim 8 -> data/ant.png
setting runs.tiny.resolutions [64,128] -> data/ant.png
setting datasets.shapes.fit crop -> data/ant.png
""",
    trained="train_tiny",
)

WORLDS = {"images": IMAGES, "clips": CLIPS, "scripts": SCRIPTS, "sdscripts": STRATEGIES}
