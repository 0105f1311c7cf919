"""Small projects of the architectures that musubi-tuner's own scripts encode."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import world
import yaml
from PIL import Image

STEMS = tuple(world.CAPTIONS)
SIZES = dict(zip(STEMS, [(64, 64), (96, 64), (64, 96), (80, 80), (64, 64), (96, 64)], strict=False))
CAPTION, PICTURE, CONTROL = STEMS[1:4]
"""Items of which a caption, a picture and a control are edited."""


@dataclass(frozen=True)
class World:
    """A project of one architecture.

    Attributes:
        weights: family of tiny weights, see tests/trainers/tiny/models.yaml.
        model: the model's keys; places of weights are names of files among them.
        dataset: keys of the dataset.
        controls: endings of the names of controls, `("", "_1")` for two.
        layers: layers of an item besides its picture.
        video: whether its items are videos.
        builds: whether Snakemake builds it; else this process carries its orders out.
    """

    weights: str
    model: dict[str, Any]
    dataset: dict[str, Any] = field(default_factory=dict)
    controls: Sequence[str] = ()
    layers: int = 0
    video: bool = False
    builds: bool = False


WORLDS = {
    name: World(**values)
    for name, values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def picture(path: Path, seed: int, size: tuple[int, int], mode: str = "RGB") -> None:
    """Draw a picture; one with transparency is opaque on its left half."""
    world.draw(path, seed, size)
    if mode == "RGBA":
        with Image.open(path) as image:
            image = image.convert("RGBA")
        image.putalpha(Image.new("L", size, 255))
        image.paste((0, 0, 0, 0), (size[0] // 2, 0, *size))
        image.save(path)


def video(path: Path, seed: int, size: tuple[int, int]) -> None:
    """Write a video of 20 frames."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=24)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(20):
            colour = ((37 * seed + 5 * number) % 256, (90 + 11 * seed) % 256, 9 * number)
            frame = av.VideoFrame.from_image(Image.new("RGB", size, colour))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def item(each: World, folder: Path, stem: str, seed: int) -> None:
    """Write the picture or the video of an item."""
    if each.video:
        video(folder / f"{stem}.mp4", seed, SIZES[stem])
    else:
        picture(folder / f"{stem}.png", seed, SIZES[stem], "RGBA" if each.layers else "RGB")


def config(each: World, tuner: Path, venv: Path) -> dict[str, Any]:
    """Return the configuration of a project, whose run is `real`."""

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(one) for one in value]
        if isinstance(value, dict):
            return {key: f"models/{name}" for key, name in value.items()}
        named = isinstance(value, str) and value.endswith(".safetensors")
        return f"models/{value}" if named else value

    dataset = {"path": "data", "fit": "bucket", **each.dataset}
    if each.controls:
        dataset["control_directory"] = "controls"
    return {
        "datasets": {"shapes": dataset},
        "models": {"tiny": {key: place(value) for key, value in each.model.items()}},
        "runs": {"real": {"datasets": ["shapes"], "model": "tiny", "resolutions": [64]}},
        "musubi_tuner": {"path": os.fspath(tuner), "venv": os.fspath(venv), "num_workers": 1},
    }


def write(each: World, folder: Path, weights: Path) -> None:
    """Write the pictures, captions, controls and weights of a project."""
    shutil.copytree(weights, folder / "models")
    mode = "RGBA" if each.layers else "RGB"
    for number, stem in enumerate(STEMS):
        size = SIZES[stem]
        (folder / "data").mkdir(exist_ok=True)
        (folder / f"data/{stem}.txt").write_text(world.CAPTIONS[stem])
        item(each, folder / "data", stem, number)
        for layer in range(each.layers):
            picture(folder / f"data/{stem}_{layer}.png", 40 + 10 * layer + number, size, mode)
        for place, ending in enumerate(each.controls):
            path = folder / f"controls/{stem}{ending}.png"
            picture(path, 20 + 10 * place + number, size)
