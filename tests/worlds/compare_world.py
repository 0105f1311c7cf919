"""Sample pictures of one colour each, so that a test sees which of them is shown."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latentmake.config import SdTrainer, Weights
from latentmake.reports.comparison_order import Source
from latentmake.training.loop.order import Prompt
from latentmake.training.loop.sample_images import write_pictures
from latentmake.training.order import Wanted
from latentmake.training.sd.order import SdOrder
from PIL import Image

Colour = tuple[int, int, int]


def png(colour: Colour, size: tuple[int, int] = (16, 16)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


def colour_of(run: int, prompt: int, step: int) -> Colour:
    """A colour for each picture, far enough from all others of few runs, prompts and steps."""
    return (40 + 90 * run, 30 + 100 * prompt, 20 + step // 2)


def make_run(
    root: Path,
    name: str,
    prompts: Sequence[str],
    steps: Sequence[int],
    *,
    number: int = 0,
    size: tuple[int, int] = (16, 16),
    weights: str = "w",
    **settings: Any,
) -> Source:
    """Write the sample pictures of a run; `number` picks their colours."""
    order = SdOrder(
        run=name,
        manifest="manifest.jsonl",
        lock="dataset.lock",
        output=f"runs/{name}",
        unet=Weights(path="models/unet"),
        weights=weights * 64,
        scheduler="models/scheduler",
        vae=Weights(path="models/vae"),
        prompts=[Prompt(prompt=prompt, text="text") for prompt in prompts],
        negative=None,
        sample_size=size,
        trainer=SdTrainer(**{"kind": "sd", **settings}),
    )
    rows: Mapping[int, list[bytes]] = {
        step: [png(colour_of(number, column, step), size) for column in range(len(prompts))]
        for step in steps
    }
    want = Wanted(data="d" * 64, settings="s" * 64, weights=weights * 64)
    folder = root / "runs" / name / "samples"
    write_pictures(folder, order, want, rows, curves=False)
    return Source(name=name, kind="run", path=str(folder))


def make_folder(root: Path, name: str, pictures: Mapping[str, Colour]) -> Source:
    """Write a folder of images: path with its ending -> colour."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, colour in pictures.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), colour).save(folder / file)
    return Source(name=name, kind="folder", path=str(folder))
