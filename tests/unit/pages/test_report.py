"""Caches and training of a report: sizes by headers, curves, sample pictures."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from latentmake.formats import cachefile, npz
from latentmake.pages.following import training_section, write_evaluation
from latentmake.pages.report import _size
from latentmake.runs.results import METRICS, Losses, Metrics, Result
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

pytestmark = pytest.mark.usefixtures("working")


def write(path: str, **tensors: tuple[int, ...]) -> str:
    if path.endswith(".npz"):
        arrays = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
        data = npz.serialize(arrays, {})
    else:
        data = cachefile.serialize(
            {name: torch.ones(shape) for name, shape in tensors.items()}, {"a": "b"}
        )
    Path(path).write_bytes(data)
    return path


def test_sizes_are_read_off_the_headers_of_every_layout() -> None:
    assert _size(write("a.safetensors", latents=(4, 6, 8))) == (8, 6, 1)
    clip = write("clip.safetensors", latents_21x6x10_float32=(16, 21, 6, 10), image=(1, 2))
    assert _size(clip) == (10, 6, 21)
    archive = write("x.npz", **{"latents_5x7": (16, 5, 7), "original_size_5x7": (2,)})
    assert _size(archive) == (7, 5, 1)


def test_files_that_are_gone_or_damaged_are_not_counted() -> None:
    whole = write("a.safetensors", latents=(4, 6, 8))
    Path("b.safetensors").write_bytes(Path(whole).read_bytes()[:-1])
    Path("c.npz").write_bytes(b"PK\x03\x04 and no more")
    other = write("d.safetensors", something=(4, 6, 8))
    assert [*map(_size, ("b.safetensors", "c.npz", other, "e.safetensors"))] == [None] * 4


def pictures() -> dict[str, Image.Image]:
    found = {}
    for name, uri in training_section("r")["pictures"]:
        found[name] = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    return found


def test_without_any_training_the_report_says_so() -> None:
    assert training_section("r") == {"words": "Not trained yet.", "pictures": []}


def test_the_pictures_of_a_training_are_shown_large_ones_scaled_down() -> None:
    Path("runs/r").mkdir(parents=True)
    Image.new("RGB", (1200, 600), "red").save("runs/r/curves.png")
    Image.new("RGB", (4800, 2000), "blue").save("runs/r/samples.png")
    Path("runs/r/training.json").write_text(
        '{"parts": {}, "seconds": 0, "steps": 200, "loss_start": 0.5, "loss_end": 0.25}'
    )
    found = pictures()
    assert (found["Curves"].size, found["Sample pictures"].size) == ((1200, 600), (2400, 1000))
    assert training_section("r")["words"] == "200 steps · loss 0.5 → 0.25"


def test_a_damaged_picture_of_a_training_is_a_word_and_no_traceback() -> None:
    Path("runs/r").mkdir(parents=True)
    Image.new("RGB", (64, 64), "red").save("runs/r/curves.png")
    Path("runs/r/samples.png").write_bytes(Path("runs/r/curves.png").read_bytes()[:60])
    assert [*pictures()] == ["Curves"]
    assert training_section("r")["words"] == "Sample pictures: the file is damaged"


def test_curves_of_a_trainer_that_draws_none_are_drawn_from_its_newest_events() -> None:
    for name in ("first", "second"):
        writer = SummaryWriter(f"runs/r/output/logs/{name}")
        for step in range(3):
            writer.add_scalar("loss/average", float(step), step)
        writer.close()
    Path("runs/r/output/logs/second/events.out.tfevents.empty").touch()
    assert pictures()["Curves"].width == 1200
    assert not Path("runs/r/curves.png").exists()


def test_the_page_of_an_evaluation_has_the_losses_of_each_group() -> None:
    def result(name: str, group: str, base: float) -> Result:
        both = {"base": base, "adapter": base / 2}
        losses = {kind: Losses(key=name, values=[loss, loss]) for kind, loss in both.items()}
        return Result(name=name, source=name, caption="", group=group, losses=losses)

    found = [("a", "rain", 1.0), ("b", "sun", 2.0), ("c", "rain", 4.0), ("d", "", 8.0)]
    metrics = Metrics(
        run="waves",
        parts={},
        timesteps=[900.0, 100.0],
        loss={"base": 3.75, "adapter": 1.875},
        loss_by_timestep={"base": [3.75, 3.75], "adapter": [1.875, 1.875]},
        fps=24,
        items="",
        results=[result(*each) for each in found],
    )
    metrics.write(Path(METRICS))
    write_evaluation(Path(), Path("page.html"), lambda line: None)
    text = Path("page.html").read_text()
    for name, base in (("rain (2)", 2.5), ("sun (1)", 2.0), ("others (1)", 8.0)):
        assert f'["{name}","{base:#.4g}","{base / 2:#.4g}","-50.00 %"]' in text
    alone = [each.model_copy(update={"group": ""}) for each in metrics.results]
    metrics.model_copy(update={"results": alone}).write(Path(METRICS))
    write_evaluation(Path(), Path("page.html"), lambda line: None)
    assert "Loss by group" in text and "Loss by group" not in Path("page.html").read_text()
