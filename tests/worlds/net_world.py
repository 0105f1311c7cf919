"""Small projects of each kind, and the commands whose output test_net.py pins."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fast_tuner
import sdscripts_world
import strategies_world
import world
from latentmake.config.musubi import MUSUBI
from project import ROOT, Project

GIVEN = ("config", "data", "models", "musubi-tuner", "sd-scripts")
"""Folders of a project, besides those of Latentmake, that no command makes."""

Edit = Callable[[Project], object]
Step = str | Edit


class World(NamedTuple):
    """A project and the steps on it; each command prints or lists something."""

    make: Callable[[Path, Path], Project]
    targets: Sequence[Step]
    words: Sequence[Step]
    edits: Mapping[Edit, str]  # to what is explained after it
    after: Sequence[str]  # each edit
    built: Sequence[str]  # after the first three edits together


def setting(*place: str, **values: Any) -> Edit:
    """Return an edit that sets keys of the section at a place of the configuration."""

    def edit(project: Project) -> None:
        config = section = project.config
        for key in place:
            section = section[key]
        section.update(values)
        project.config = config

    edit.__name__ = f"{'.'.join(place)}: {values}"
    return edit


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
    (project / "data/listed.jsonl").write_text("\n".join(rows))
    return project


def edit_a_caption(project: Project) -> None:
    (project / "data/shapes/ant.txt").write_text("other words\n", encoding="utf-8")


def replace_an_image(project: Project) -> None:
    world.draw(project / "data/shapes/cat.png", 50)


def remove_an_item(project: Project) -> None:
    for path in (project / "data/shapes").glob("bee.*"):
        path.unlink()


def rename_an_item(project: Project) -> None:
    for path in (project / "data/shapes").glob("dog.*"):
        path.rename(path.with_name(f"hound{path.suffix}"))


def edit_a_row_of_the_list(project: Project) -> None:
    path = project / "data/listed.jsonl"
    path.write_text(path.read_text().replace("picture 1", "another picture"))


def damage_a_cache_file(project: Project) -> None:
    path = max((project / "cache").rglob("ant.latents.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)


def forget_the_caches(project: Project) -> None:
    for name in ("cache", ".latentmake"):
        shutil.rmtree(project / name)


def write_a_dataset_file(project: Project) -> None:
    text = '[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "data/shapes"\n'
    (project / "theirs.toml").write_text(f"{text}num_repeats = 2\n")


IMAGES = World(
    make_images,
    targets=(
        "snakemake -n",
        "snakemake cache/shapes/micro/16/ant.latents.safetensors",
        "snakemake latents_small",
        "snakemake text_small",
        "snakemake caches_tiny",
        "files",
        "receipts",
        "snakemake train_tiny",
        "snakemake all",
        "snakemake -n all",
        "snakemake cache/shapes/micro/text/ant.text.safetensors",
        "snakemake cache/shapes/micro/16/nobody.latents.safetensors",
        "snakemake generate_tiny",
        "snakemake evaluate_tiny",
        "snakemake publish_tiny",
        "snakemake clips_tiny",
        "snakemake export_small",
        "snakemake -n report_tiny",
        "files",
        "read runs/tiny/manifest.jsonl runs/tiny/dataset.lock runs/tiny/trained.json",
        "read runs/small/manifest.jsonl runs/small/dataset.lock",
    ),
    words=(
        "latentmake status",
        "latentmake status --json",
        "latentmake explain cache/shapes/micro/32/ant.latents.safetensors",
        "latentmake explain data/shapes/ant.png --json",
        "latentmake check",
        "latentmake check --json",
        "latentmake verify",
        "latentmake verify --json",
        "latentmake captions tiny",
        "latentmake captions tiny --json",
        "page reports/captions_tiny.html",
        "latentmake report tiny",
        "page reports/report_tiny.html",
        "latentmake compare tiny",
        "page reports/compare_tiny.html",
        "latentmake prune --json",
        "latentmake show runs/tiny/dataset.lock",
        "latentmake show cache/shapes/micro/text.1/ant.text.safetensors",
        "latentmake show data/shapes/ant.png",
        "latentmake doctor",
        "latentmake init data/shapes --output new.yaml",
        "read new.yaml",
        write_a_dataset_file,
        "latentmake import theirs.toml --architecture sd1",
        damage_a_cache_file,
        "latentmake verify --repair",
        "latentmake status -v",
        "files",
        setting("datasets", "shapes", captions={}),
        "latentmake prune",
        "latentmake prune --yes",
        forget_the_caches,
        "latentmake adopt small",
        "latentmake status small",
        "latentmake explain data/pictures/0.png",
        "snakemake caches_small",
        "files",
    ),
    edits={
        edit_a_caption: "data/shapes/ant.txt",
        replace_an_image: "data/shapes/cat.png",
        remove_an_item: "cache/shapes/micro/16/bee.latents.safetensors",
        rename_an_item: "data/shapes/hound.png",
        edit_a_row_of_the_list: "data/pictures/1.png",
        setting("runs", "tiny", "trainer", rank=4): "data/shapes/ant.png",
        setting("runs", "tiny", resolutions=[16, 24]): "data/shapes/ant.png",
        setting("datasets", "listed", fit="crop"): "data/pictures/1.png",
    },
    after=("snakemake -n train_tiny", "latentmake status tiny -v"),
    built=("snakemake train_tiny", "snakemake -n train_tiny", "receipts", "files"),
)


# -- clips and pictures of Wan, trained here -------------------------------------------------------

WAN = "train_waves generate_waves evaluate_waves"


def make_wan(folder: Path, micro: Path) -> Project:
    names = {"vae": "vae", "text": "text_encoder", "dit": "transformer"}
    model = {key: f"models/tiny-wan/{name}" for key, name in names.items()}
    trainer = {"kind": "wan", "rank": 2, "steps": 2, "mixed_precision": "no"}
    run = {"datasets": ["clips", "pictures"], "model": "tiny-wan", "resolutions": [[64, 48]]}
    drawn = {"prompts": ["calm waves"], "num_inference_steps": 1}
    project = Project.make(
        folder,
        {
            "datasets": {
                "clips": {"path": "data/clips", "target_frames": [5], "fit": "crop"},
                "pictures": {"path": "data/pictures"},
            },
            "models": {"tiny-wan": {"task": "t2v-1.3B", **model}},
            "runs": {
                "waves": {**run, "trainer": trainer, "generate": drawn, "validation": {"items": 1}},
                "tuned": {**run, "datasets": ["clips"]},
            },
        },
        ROOT / "data/tiny-wan",
    )
    for place, stems in {
        "clips": ("calm_blue_grey", "high_blue_pink", "rolling_blue_yellow", "choppy_blue_orange"),
        "pictures": ("calm_teal_yellow",),
    }.items():
        (project / f"data/{place}").mkdir(parents=True)
        for path in (ROOT / f"data/waves/{place}").iterdir():
            if path.stem in stems:
                shutil.copy2(path, project / f"data/{place}/{path.name}")
    return project


def edit_the_caption_of_a_clip(project: Project) -> None:
    (project / "data/clips/calm_blue_grey.txt").write_text("other waves\n", encoding="utf-8")


def replace_a_clip(project: Project) -> None:
    clips = project / "data/clips"
    shutil.copyfile(ROOT / "data/waves/clips/calm_teal_pink.mp4", clips / "high_blue_pink.mp4")


def remove_a_clip(project: Project) -> None:
    for path in (project / "data/clips").glob("rolling*"):
        path.unlink()


CLIPS = World(
    make_wan,
    targets=(
        "snakemake -n",
        "snakemake clips_waves",
        "snakemake latents_waves",
        "snakemake text_waves",
        "snakemake caches_tuned",
        f"snakemake {WAN}",
        "snakemake all",
        f"snakemake -n all {WAN}",
        "snakemake publish_tuned",
        "snakemake export_tuned",
        "receipts",
        "files",
        "read runs/waves/manifest.jsonl runs/waves/dataset.lock runs/waves/trained.json",
        "read clips/waves/train.jsonl runs/waves/generated/index.json",
    ),
    words=(
        "latentmake status",
        "latentmake status waves --json",
        "latentmake explain data/clips/calm_blue_grey.mp4",
        "latentmake check",
        "latentmake verify",
        "latentmake captions waves --json",
        "latentmake report waves",
        "page reports/report_waves.html",
        "latentmake compare waves",
        "latentmake show runs/waves/dataset.lock",
        "latentmake init data/clips --model models/tiny-wan --output new.yaml",
        "read new.yaml",
        setting("datasets", "clips", fit="bucket"),
        "latentmake prune -v",
    ),
    edits={
        edit_the_caption_of_a_clip: "data/clips/calm_blue_grey.txt",
        replace_a_clip: "data/clips/high_blue_pink.mp4",
        remove_a_clip: "data/clips/choppy_blue_orange.mp4",
        setting("runs", "waves", "trainer", rank=4): "data/pictures/calm_teal_yellow.png",
        setting("runs", "waves", resolutions=[[48, 32]]): "data/clips/calm_blue_grey.mp4",
        setting("datasets", "clips", target_frames=[1, 9]): "data/clips/calm_blue_grey.mp4",
    },
    after=(f"snakemake -n {WAN}", "latentmake status -v"),
    built=(f"snakemake {WAN}", "receipts", "files"),
)


# -- Qwen-Image-Edit, whose caches musubi-tuner's scripts make -------------------------------------


def make_scripts(folder: Path, micro: Path) -> Project:
    tensors = {
        "vae": "encoder",
        "text": "embedding",
        "dit": "transformer_blocks.0.img_mod.1.weight",
    }
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


def replace_a_control_image(project: Project) -> None:
    world.draw(project / "data/control/ant.png", 9, (96, 96))


TRAINED = (
    "snakemake -n train_tiny",
    "snakemake latents_tiny",
    "snakemake text_tiny",
    "snakemake train_tiny",
    "snakemake -n all",
    "snakemake publish_tiny",
    "snakemake generate_tiny",
    "receipts",
    "files",
    "read runs/tiny/manifest.jsonl runs/tiny/dataset.lock runs/tiny/trained.json",
)
ASKED = (
    "latentmake status --json",
    "latentmake check",
    "latentmake verify",
    "latentmake report tiny",
    "page reports/report_tiny.html",
    "latentmake captions tiny --json",
    "latentmake compare tiny",
    "latentmake show runs/tiny/dataset.lock",
    "latentmake doctor",
    setting("runs", "tiny", resolutions=[128]),
    "latentmake prune",
)

SCRIPTS = World(
    make_scripts,
    targets=TRAINED,
    words=("latentmake explain data/shapes/ant.png", *ASKED),
    edits={
        edit_a_caption: "data/shapes/ant.txt",
        replace_an_image: "data/shapes/cat.png",
        remove_an_item: "data/shapes/ant.png",
        replace_a_control_image: "data/shapes/ant.png",
        setting("runs", "tiny", "trainer", network_dim=8): "data/shapes/ant.png",
        setting("runs", "tiny", resolutions=[64, 128]): "data/shapes/ant.png",
        setting("datasets", "shapes", fit="crop"): "data/shapes/ant.png",
    },
    after=("snakemake -n train_tiny", "latentmake status -v"),
    built=("snakemake train_tiny", "receipts", "files"),
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


def edit_a_caption_of_lumina(project: Project) -> None:
    (project / "data/ant.txt").write_text("two words", encoding="utf-8")


def replace_an_image_of_lumina(project: Project) -> None:
    world.draw(project / "data/cat.png", 50, (80, 64))


def remove_an_item_of_lumina(project: Project) -> None:
    for path in (project / "data").glob("bee.*"):
        path.unlink()


STRATEGIES = World(
    make_strategies,
    targets=TRAINED,
    words=("latentmake explain data/ant.png", *ASKED),
    edits={
        edit_a_caption_of_lumina: "data/ant.txt",
        replace_an_image_of_lumina: "data/cat.png",
        remove_an_item_of_lumina: "data/ant.png",
        setting("runs", "tiny", "trainer", network_dim=8): "data/ant.png",
        setting("runs", "tiny", resolutions=[64, 128]): "data/ant.png",
        setting("datasets", "shapes", fit="crop"): "data/ant.png",
    },
    after=("snakemake -n train_tiny", "latentmake status -v"),
    built=("snakemake train_tiny", "receipts", "files"),
)

WORLDS = {"images": IMAGES, "clips": CLIPS, "scripts": SCRIPTS, "sdscripts": STRATEGIES}
