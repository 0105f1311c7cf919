"""Worlds of the guides about pictures and Stable Diffusion 1.5: 30 pictures, tiny weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import world
from PIL import Image, ImageDraw
from project import Project

if TYPE_CHECKING:
    from guide_world import Here

SMALL = {"latents 512": "latents 64"}
"""Trainings of tests see small pictures."""
SHORT = {
    **{"[512]": "[64]", "steps: 750": "steps: 4"},
    "every: 150, num_inference_steps: 25": "every: 2, num_inference_steps: 1",
}
SHORT_STYLE = {
    **{"[512]": "[64]", "latents 512": "latents 64", "steps: 750": "steps: 4"},
    **{"n_steps: 150": "n_steps: 2", "every: 150": "every: 2\n        num_inference_steps: 1"},
}

_CONFIG = """
datasets:
  ginger: {{path: pictures/ginger, fit: bucket}}
models:
  sd15:
    vae: models/sd15/vae
    text: models/sd15/text_encoder
    unet: models/sd15/unet
    dtype: float16
runs:
  ginger:
    datasets: [ginger]
    model: sd15
    resolutions: [{size}]
    trainer:
      kind: sd
      rank: 16
      learning_rate: 1e-4
      steps: 4
      samples: {{every: 2, num_inference_steps: 2}}
"""  # as `latentmake init` writes it, for fewer steps


def pictures(here: Here) -> None:
    """30 pictures of one style with captions, in `pictures/ginger`."""
    make_pictures(here.project / "pictures/ginger")


def built(here: Here) -> None:
    """The pictures, the model and `ginger.yaml`, with all caches built."""
    _take(here, "guide-built", partial(_make, 512, "caches_ginger"))


def trained(here: Here) -> None:
    """The same at a smaller size, and a training that has ended."""
    _take(here, "guide-trained", partial(_make, 64, "train_ginger"))


def carried(here: Here) -> None:
    """The same; `rsync` makes another folder of what it names, under other times."""
    trained(here)

    def carry(words: list[str]) -> None:
        first = here.project
        here.project = Project.make(first.folder.parent / "other", {})
        for name in words[1:-1]:
            if (first / name).exists():
                whole = shutil.copytree if (first / name).is_dir() else shutil.copyfile
                whole(first / name, here.project / name)  # without times and hard links
        here.project.scramble_mtimes()

    here.handlers["rsync"] = carry


def _take(here: Here, name: str, make: Callable[[Path], None]) -> None:
    folder = here.project.folder
    shutil.rmtree(folder)
    Project(here.made(name, make)).copy(folder)


def _make(size: int, target: str, folder: Path) -> None:
    project = Project.make(folder, {})
    make_pictures(project / "pictures/ginger")
    make_model(project / "models/sd15")
    (project / "ginger.yaml").write_text(_CONFIG.format(size=size), encoding="utf-8")
    project.run(target, "--configfile", "ginger.yaml")


def make_pictures(folder: Path) -> None:
    """Draw 30 pictures of two sizes, with captions; every picture is another one."""
    things = ("a cat", "a boat", "a lighthouse", "a fox", "a teapot", "a bicycle")
    places = ("in the rain", "on a hill", "at dusk", "in the snow", "by the sea")
    folder.mkdir(parents=True)
    for number, (thing, place) in enumerate((x, y) for y in places for x in things):
        width, height = ((640, 512), (576, 704))[number % 2]
        colour = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
        image = Image.new("RGB", (width, height), colour)
        pen = ImageDraw.Draw(image)
        shape = pen.ellipse if number % 3 else pen.rectangle
        shape((width // 4, height // 4, width * 3 // 4, height * 3 // 4), fill="orange", width=9)
        image.save(folder / f"{number + 1:02}.jpg", quality=90)
        caption = f"{thing} {place}, ginger style\n"
        (folder / f"{number + 1:02}.txt").write_text(caption, encoding="utf-8")


def make_model(folder: Path) -> None:
    """Save a Stable Diffusion with the widths of 1.5's text and few weights."""
    world.make_model(folder, width=768)
    path = folder / "unet/config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "sample_size": 64}), encoding="utf-8")
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')


def make_repository(folder: Path) -> None:
    """Write the files of Stable Diffusion 1.5's repository by their names."""
    make_model(folder)
    for name, endings in (
        ("unet/diffusion_pytorch_model", ("", ".fp16", ".non_ema")),
        ("vae/diffusion_pytorch_model", ("", ".fp16")),
        ("text_encoder/model", (".fp16",)),
    ):
        for each in endings:
            if each:
                shutil.copyfile(
                    folder / f"{name}.safetensors", folder / f"{name}{each}.safetensors"
                )
            if Path(name).name != "model":
                (folder / f"{name}{each}.bin").write_bytes(b"not for a guide")
    for name in (
        "text_encoder/pytorch_model.bin",
        "text_encoder/pytorch_model.fp16.bin",
        "v1-5-pruned-emaonly.safetensors",
        "safety_checker/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for a guide")


def make_other_vae(folder: Path) -> None:
    """Write a VAE of the same shapes and other weights."""
    from safetensors.torch import load_file, save_file

    model = folder.with_name("for-other-vae")
    make_model(model)
    name = "diffusion_pytorch_model.safetensors"
    weights = load_file(model / "vae" / name)
    changed = {each: value * 1.01 for each, value in weights.items()}
    save_file(changed, folder / name, metadata={"format": "pt"})
    shutil.copyfile(model / "vae/config.json", folder / "config.json")
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"not for a guide")
