"""Sample pictures of one colour each, so that a test sees which of them is shown."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentmake.base import atomic
from latentmake.config.models import Model
from latentmake.config.trainers import SdTrainer
from latentmake.pages.pictured import Pictured, index_of
from latentmake.plan.manifest import run_folder
from latentmake.plan.product import Parts
from latentmake.runs.order import Record
from latentmake.runs.results import INDEX
from latentmake.trainers.loop.order import Prompt
from latentmake.trainers.loop.samples import picture_index
from latentmake.trainers.sd.unet import SdOrder
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

Colour = tuple[int, int, int]


def png(colour: Colour, size: tuple[int, int] = (16, 16)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


def colour_of(run: int, prompt: int, step: int) -> Colour:
    """A colour for each picture, far enough from all others of few runs, prompts and steps."""
    return (40 + 90 * run, 30 + 100 * prompt, 20 + step // 2)


def make_run(
    name: str,
    prompts: Sequence[str],
    steps: Sequence[int],
    *,
    number: int = 0,
    size: tuple[int, int] = (16, 16),
    weights: str = "w",
    **settings: Any,
) -> Pictured:
    """Write the sample pictures of a run of this folder; `number` picks their colours."""
    order = SdOrder(
        run=name,
        manifest="manifest.jsonl",
        lock="dataset.lock",
        output=f"runs/{name}",
        model=Model.model_validate(
            {**{each: f"models/{each}" for each in ("unet", "vae", "scheduler")}, "text": "text"}
        ),
        weights=weights * 64,
        prompts=[Prompt(prompt=prompt, text="text") for prompt in prompts],
        negative=None,
        sample_size=size,
        trainer=SdTrainer(**{"kind": "sd", **settings}),
    )
    rows: dict[int, list[str]] = {
        step: [f"step-{step:06d}_{column:02d}.png" for column in range(len(prompts))]
        for step in steps
    }
    folder = Path("runs", name, "samples")
    for step in steps:
        for column, file in enumerate(rows[step]):
            atomic.write(folder / file, png(colour_of(number, column, step), size))
    want: Parts = {"dataset": "d" * 64, "settings": "s" * 64, "network": weights * 64}
    picture_index(order, want, rows).write(folder / INDEX)
    return Pictured(name, run_folder(name), index_of(run_folder(name)), None)


def make_trained(name: str, steps: int) -> Parts:
    """Write the record, the LoRA and the losses of a run that `make_run` made; one loss is NaN."""
    want: Parts = {"dataset": "d" * 64, "settings": "s" * 64, "network": "w" * 64}
    files = {"kohya.safetensors": "f"}
    record = Record(
        parts=want, steps=steps, loss_start=1, loss_end=1, seconds=1, files=files
    )  # fmt: skip
    folder = Path("runs", name)
    record.write(folder / "training.json")
    (folder / "kohya.safetensors").touch()
    writer = SummaryWriter(str(folder / "logs"))
    for step in range(steps):
        writer.add_scalar("loss", float("nan") if step == 0 else 1.0, step)
        writer.add_scalar("epoch", step, step)
    writer.close()
    return want
