"""The curves of a training: read from real event files, drawn into one picture."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path

import numpy as np
import pytest
from latentmake.pages.curves import curves_png, read_curves
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

BLUE = (31, 111, 235)


def write(folder: Path, steps: int = 60, first: int = 1) -> None:
    random = np.random.default_rng(first)
    writer = SummaryWriter(str(folder), purge_step=first)
    for step in range(first, steps + 1):
        writer.add_scalar("zeta", float(step), step)
        writer.add_scalar("learning_rate", 1e-3 * (1 - step / 60), step)
        writer.add_scalar("loss", 1 / step + 0.1 * random.normal(), step)
    writer.close()


def blue(picture: Image.Image) -> int:
    """Return how many pixels have the colour of a curve."""
    pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    return int(np.count_nonzero((pixels == BLUE).all(axis=1)))


def test_every_scalar_is_read_and_known_ones_come_first(tmp_path: Path) -> None:
    write(tmp_path)
    curves = read_curves(tmp_path)
    assert [*curves] == ["loss", "learning_rate", "zeta"]
    for steps, _ in curves.values():
        assert steps.tolist() == list(range(1, 61))
    assert curves["zeta"][1].tolist() == list(range(1, 61))


def test_what_a_resumed_training_wrote_anew_is_drawn_once_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, steps=40)
    time.sleep(1)  # files of one second are read in the order of their names, not of their writing
    write(tmp_path, steps=60, first=21)
    assert read_curves(tmp_path)["loss"][0].tolist() == list(range(1, 61))
    assert not caplog.records


def test_epochs_and_a_second_curve_of_the_same_loss_have_no_panel(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "same"))
    other = SummaryWriter(str(tmp_path / "other"))
    for step in range(1, 61):
        loss = 1 / step + 0.1 * (step % 2)
        for each, raw in ((writer, loss), (other, 2 * loss)):
            each.add_scalar("loss", loss, step)
            each.add_scalar("raw_loss", raw, step)
            each.add_scalar("epoch", step / 7, step)
    writer.close()
    other.close()
    drawn = []
    for name in ("same", "other"):
        data = curves_png(tmp_path / name)
        assert data is not None
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.getpixel((0, 0))[3] == 0  # on a dark page it is dark
            right = picture.crop((picture.width // 2, 0, *picture.size))
            drawn.append(blue(right) > 100)
    assert drawn == [False, True]


def test_the_picture_is_1200_pixels_wide_and_has_a_curve_in_each_panel(tmp_path: Path) -> None:
    write(tmp_path / "logs")
    data = curves_png(tmp_path / "logs", title="a $run_{1}$ <b>")
    assert data is not None
    with Image.open(io.BytesIO(data)) as picture:
        width, height = picture.size
        assert width == 1200
        drawn = [
            blue(picture.crop((x, y, x + width // 2, y + height // 2)))
            for y in (0, height // 2)
            for x in (0, width // 2)
        ]
    assert all(count > 100 for count in drawn[:3]), drawn
    assert drawn[3] == 0


def test_without_scalars_there_is_no_picture(tmp_path: Path) -> None:
    assert curves_png(tmp_path / "nowhere") is None
    (tmp_path / "logs").mkdir()
    assert curves_png(tmp_path / "logs") is None


def test_event_files_that_were_cut_short_give_what_they_hold(tmp_path: Path) -> None:
    write(tmp_path / "logs")
    (file,) = (tmp_path / "logs").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    curves = read_curves(tmp_path / "logs")
    assert 20 < len(curves["loss"][0]) < 40
    assert curves_png(tmp_path / "logs")
    file.write_bytes(b"no events at all")
    assert not curves_png(tmp_path / "logs")


@pytest.mark.parametrize("values", [[1.0], [math.nan, math.inf, 2.0], [math.nan], [1e-30, 1e30]])
def test_odd_values_are_drawn_or_left_out(tmp_path: Path, values: list[float]) -> None:
    writer = SummaryWriter(str(tmp_path / "logs"))
    for step, value in enumerate(values):
        writer.add_scalar("odd/name $", value, step)
    writer.close()
    assert curves_png(tmp_path / "logs")
