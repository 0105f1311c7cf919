"""What the guides of other trainers assume to be there: pictures, films, caches, trainers, weights.

Trainers lie beside the folder of a guide, as users have them; stand-ins for them read a dataset and
train nothing. A function of a hub writes a repository's files, tiny.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoint_world
import dit_world
import musubi_world
import numpy as np
import sdscripts_world
import style_guides
import wan_world
import world
import yaml
from project import ROOT, Project
from safetensors.torch import load_file, save_file
from video_world import write_video

if TYPE_CHECKING:
    from guide_world import Here

CAPTIONS = ("a red circle", "a blue square on a table", "a green circle", "a yellow square")
SIZES = ((120, 90), (90, 120), (100, 100), (140, 80))
SHORT_CLIPS = {
    "target_frames: 81": "target_frames: 17",
    '"frames": 81': '"frames": 17',
    "[[832, 480]]": "[[96, 64]]",
    "832x480": "96x64",
    "epochs: 20}": "epochs: 1}",
    "prompts: [a harbour at night]}": "prompts: [a harbour at night], num_inference_steps: 2}",
}
"""Text of the guide about films -> short clips in its place."""
SMALL_FILES = {"1024": "256"}
"""Text of the guide about sd-scripts -> small pictures."""
SMALL = {"1024": "128", "max_train_epochs: 16": "max_train_epochs: 1"}
"""Text of the guides about other trainers -> small pictures and one epoch."""
TOKENIZER = ROOT / "data/tiny-sd/tokenizer"
MUSUBI, SD_SCRIPTS = "../musubi-tuner", "../sd-scripts"


def pictures(folder: Path, name: str, count: int = 12, scale: int = 8) -> None:
    """Draw pictures of several shapes, with a caption each: `name_01.png`, `name_01.txt`."""
    for number in range(1, count + 1):
        width, height = SIZES[number % len(SIZES)]
        stem = folder / f"{name}_{number:02}"
        world.draw(stem.with_suffix(".png"), number, (scale * width, scale * height))
        stem.with_suffix(".txt").write_text(f"{name}, {CAPTIONS[number % len(CAPTIONS)]}\n")


def videos(folder: Path) -> None:
    """Write four films of two seconds and more, with a caption each."""
    folder.mkdir()
    for number, name in enumerate(("harbour", "market", "station", "street")):
        write_video(folder / f"{name}.mp4", "libx264", 60 + number, size=(192, 112))
        (folder / f"{name}.txt").write_text(f"a {name} in the rain\n", encoding="utf-8")


# -- weights --------------------------------------------------------------------------------------


def sdxl(folder: Path) -> None:
    """Write a small Stable Diffusion XL: the folder of its pipeline, and its one file."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint_world.write(folder, folder / "sd_xl_base_1.0.safetensors", TOKENIZER, "sdxl")


def wan21(folder: Path) -> None:
    """Write the files of Wan 2.1's repository of its text-to-video network of 1.3B weights."""
    folder.mkdir(parents=True, exist_ok=True)
    wan_world.write_wan_vae(folder / "made")
    wan_world.write_umt5(folder / "made")
    for name in ("Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"):
        (folder / "made" / name).rename(folder / name)
    (folder / "google").mkdir()
    (folder / "made/tokenizer").rename(folder / "google/umt5-xxl")
    shutil.rmtree(folder / "made")


def wan21_dit(folder: Path) -> None:
    """Write the file of that network, in its original names, with heads of the real width."""
    place = folder / "split_files/diffusion_models"
    network = dit_world.tiny_dit(head=128, num_layers=1)
    tensors = dit_world.original_dit(network.bfloat16().state_dict())
    dit_world.write_file(tensors, place / "wan2.1_t2v_1.3B_bf16.safetensors")


# -- trainers -------------------------------------------------------------------------------------


def mark(folder: Path, commit: str) -> None:
    """Let git say that a folder is a clone at a commit."""
    for name in ("objects", "refs"):
        (folder / ".git" / name).mkdir(parents=True)
    (folder / ".git/HEAD").write_text(f"{commit:0<40}\n")


def installed(folder: Path, commit: str) -> None:
    """Give a stand-in a commit, and an environment that has what its scripts import."""
    mark(folder, commit)
    (folder / "venv").symlink_to(sys.prefix)


def sd_scripts(folder: Path) -> None:
    """Put a stand-in for sd-scripts beside a guide's folder."""
    place = sdscripts_world.stand_in(folder / SD_SCRIPTS, own_venv=False)
    installed(place, "48d368f")


def musubi_tuner(folder: Path) -> None:
    """Put a stand-in for musubi-tuner beside a guide's folder."""
    place = musubi_world.stand_in(folder / MUSUBI, own_venv=False)
    installed(place, "30c658c")


# -- caches of other programs ---------------------------------------------------------------------


def built(folder: Path, config: dict[str, Any], run: str) -> Path:
    """Build the caches of a configuration in a copy of a guide's folder; return the copy."""
    other = folder.with_name(f"{folder.name}-theirs")
    shutil.copytree(folder, other, symlinks=True)
    (other / "theirs.yaml").write_text(yaml.safe_dump(config))
    Project(other).run(f"caches_{run}", "--configfile", "theirs.yaml")
    return other / "cache"


def as_sdscripts(path: Path, place: Path) -> None:
    """Write a cache file as sd-scripts does: the same arrays, and nothing of ours."""
    with np.load(path) as found:
        np.savez(place, **{name: found[name] for name in found.files})


# -- guides ---------------------------------------------------------------------------------------


def kohya(here: Here) -> None:
    """A user of sd-scripts: pictures with its caches beside them."""
    folder = here.project.folder
    sd_scripts(folder)
    place = folder / "train/10_sks man"
    pictures(place, "sks")
    sdxl(folder / "models/sdxl")
    dataset = {"path": str(place), "fit": "bucket", "bucket_reso_steps": 64}
    checkpoint = "models/sdxl/sd_xl_base_1.0.safetensors"
    model = {"architecture": "sdxl", "layout": "sdscripts", "checkpoint": checkpoint}
    run = {"datasets": ["sks"], "model": "sdxl", "resolutions": [256]}
    config = {"datasets": {"sks": dataset}, "models": {"sdxl": model}, "runs": {"sks": run}}
    for path in built(folder, config, "sks").rglob("*.npz"):
        as_sdscripts(path, place / path.name)
    shutil.rmtree(folder / "models")


def wan(here: Here) -> None:
    """Films, and a musubi-tuner."""
    videos(here.project / "films")
    musubi_tuner(here.project.folder)


def installed_trainers(here: Here) -> None:
    """Pictures and weights; a clone of a trainer gets the commit that is checked out."""
    folder = here.project.folder
    pictures(folder / "pictures/ginger", "ginger")
    sdxl(folder / "models/sdxl")
    for write in (wan21, wan21_dit):
        write(folder / "models/wan")

    def checkout(words: list[str]) -> None:
        _, _, place, _, commit = words
        mark(folder / place, commit)

    here.handlers["git -C"] = checkout


SMALL_JOBS = {
    "partition: gpu ": "partition: test ",
    "resolutions: [512]": "resolutions: [64]",
    "latents 512": "latents 64",
    "steps: 2000}": "steps: 2, samples: {num_inference_steps: 1, guidance_scale: 1}}",
    "cpus: 8, mem_mb: 24000": "cpus: 1, mem_mb: 1500",
    "cpus: 16, mem_mb: 48000, runtime: 720": "cpus: 2, mem_mb: 4000, runtime: 60",
}
"""Text of the guide about SLURM -> jobs that a small node has room for."""


def musubi(here: Here) -> None:
    """A user of musubi-tuner: its clone beside the folder, and pictures."""
    here.handlers["git clone"](
        ["git", "clone", f"https://github.com/kohya-ss/{MUSUBI[3:]}", MUSUBI]
    )
    here.handlers["python3 -m venv"](["python3", "-m", "venv", f"{MUSUBI}/venv"])
    pictures(here.project / "pictures/ginger", "ginger")


def z_image(folder: Path, tiny: Callable[[str], Path]) -> None:
    """Write the files of Z-Image's repository, of which two networks are in several files."""
    vae, text, network = (
        tiny("z_image") / "vae.safetensors",
        tiny("z_image") / "text.safetensors",
        tiny("z_image_dit") / "dit.safetensors",
    )
    (folder / "vae").mkdir(parents=True)
    shutil.copyfile(vae, folder / "vae/diffusion_pytorch_model.safetensors")
    shards(text, folder / "text_encoder/model", 3)
    shards(network, folder / "transformer/diffusion_pytorch_model", 2)


def shards(path: Path, stem: Path, count: int) -> None:
    """Write the tensors of a file as several, with the names of a release."""
    stem.parent.mkdir(parents=True)
    tensors = load_file(path)
    for number in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[number::count]}
        save_file(part, stem.with_name(f"{stem.name}-{number + 1:05}-of-{count:05}.safetensors"))


def slurm(here: Here) -> None:
    """Pictures, weights, and shorter waits than the profile's: a node's files are seen at once."""
    profile = here.project / "profiles/slurm/config.yaml"
    text = profile.read_text().replace("latency-wait: 60", "latency-wait: 10")
    profile.write_text(text.replace("status-checks: 10", "status-checks: 2"))
    style_guides.pictures(here)
    style_guides.make_repository(here.project / "models/sd15")
