"""Small projects of each kind, and the commands whose output test_net.py pins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import world
from project import Project

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


# -- images, encoded and trained here --------------------------------------------------------------


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
    path = next((project / "cache").rglob("*ant*latents*"))
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


WORLDS = {"images": IMAGES}
