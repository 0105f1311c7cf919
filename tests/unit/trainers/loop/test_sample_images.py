"""Sample pictures as files: of one training alone, named by an index, shown by TensorBoard."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from latentmake.runs.order import RunFiles
from latentmake.runs.results import INDEX, PictureIndex
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.loop.samples import Samples
from latentmake.trainers.sd.recipe import SdPainter, SdRecipe
from latentmake.trainers.sd.unet import SdOrder
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from trainer_world import make_order

STEPS = (0, 50, 1_000_000)
NAMES = [
    *("step-000000_00.png", "step-000000_01.png", "step-000050_00.png"),
    *("step-000050_01.png", "step-1000000_00.png", "step-1000000_01.png"),
]


def painter_of(order: SdOrder) -> SdPainter:
    recipe = SdRecipe(order)
    stored = Caches(read_items(Path(order.manifest)), recipe.tensors).examples[0].latents
    settings = order.sample_settings()
    return SdPainter(recipe, settings, order.negative, stored, torch.device("cpu"))


def draw(order: SdOrder, steps: tuple[int, ...] = STEPS) -> list[int]:
    """Draw as a training does that has these steps; return those that it has drawn."""
    layout, want, drawn = RunFiles(order), order.wanted(), list[int]()
    if not layout.logs.exists():
        with SummaryWriter(str(layout.logs)) as writer:
            for step in range(1, 30):
                writer.add_scalar("loss", 1 / step, step)
    samples, painter = Samples(order, want, [want]), painter_of(order)

    def latents() -> torch.Tensor:
        drawn.append(step)
        return torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(step))

    for step in steps if order.prompts else ():
        samples.draw(step, latents, painter)
    samples.show()
    return drawn


def pngs(order: SdOrder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in RunFiles(order).samples.glob("*.png")}


@pytest.fixture
def order(tmp_path: Path) -> SdOrder:
    return make_order(tmp_path, prompts=True, steps=1_000_000)


def test_each_picture_is_a_file_that_the_index_names(order: SdOrder) -> None:
    draw(order)
    layout, files = RunFiles(order), pngs(order)
    assert sorted(files) == NAMES
    index = PictureIndex.read(layout.samples / INDEX)
    assert index is not None
    assert (index.run, index.steps, index.seed) == ("tiny", list(STEPS), 0)
    assert index.prompts == ["a shape 0", "a shape 1"]
    assert [name for row in index.files for name in row] == NAMES
    assert index.parts == order.wanted()
    assert index.settings["trainer"] == order.trainer.model_dump(mode="json")
    assert index.settings["unet"] == order.unet.path
    assert len(set(files.values())) == len(files)
    with Image.open(layout.grid) as grid:
        cells = set(grid.get_flattened_data())
    for data in files.values():
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.size == (16, 8)
            assert set(picture.get_flattened_data()) <= cells


def test_pictures_of_an_earlier_training_go(order: SdOrder, tmp_path: Path) -> None:
    draw(order)
    layout = RunFiles(order)
    later = make_order(tmp_path, prompts=True, steps=50)
    foreign = layout.samples / "mine.png"
    foreign.write_bytes(b"not ours")
    assert draw(later, (0, 50)) == [0, 50]
    assert sorted(pngs(later)) == ["mine.png", *NAMES[:4]]
    after = PictureIndex.read(layout.samples / INDEX)
    assert after is not None
    assert (after.steps, after.parts) == ([0, 50], later.wanted())


def test_a_training_that_resumes_keeps_the_pictures_that_are_there(order: SdOrder) -> None:
    assert draw(order, STEPS[:2]) == [0, 50]
    (RunFiles(order).samples / NAMES[3]).unlink()
    assert draw(order) == [50, 1_000_000]
    assert sorted(pngs(order)) == NAMES
    samples = order.trainer.samples.model_copy(update={"seed": 1})
    assert draw(order.with_settings(samples=samples)) == [*STEPS]


def test_a_training_without_prompts_has_its_curves(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=50)
    draw(order)
    layout = RunFiles(order)
    with Image.open(layout.curves) as picture:
        assert picture.width == 1200
    assert not pngs(order)
    assert not layout.grid.exists()


def test_pictures_that_are_damaged_or_deleted_meanwhile_are_blanks_in_the_grid(
    order: SdOrder,
) -> None:
    draw(order)
    folder, before = RunFiles(order).samples, RunFiles(order).grid.read_bytes()
    (folder / NAMES[0]).write_bytes((folder / NAMES[0]).read_bytes()[:60])
    samples = Samples(order, order.wanted(), [order.wanted()])
    (folder / NAMES[1]).unlink()
    samples.show()
    assert RunFiles(order).grid.read_bytes() != before
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)
    samples.show()


@pytest.mark.parametrize("place", ["latents", "VAE"])
def test_a_sample_of_nan_is_left_out_with_its_prompt_and_step(
    order: SdOrder, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    layout, painter = RunFiles(order), painter_of(order)
    latents = torch.randn(2, 4, 4, 8)
    if place == "VAE":
        painter.vae = painter.load_vae()
        next(painter.vae._vae.decoder.parameters()).data.fill_(math.nan)
        assert order.model.vae.path
    else:
        latents[1, 0, 0, 0] = math.nan
    samples = Samples(order, order.wanted())
    samples.draw(50, lambda: latents, painter)
    samples.show()
    left = [NAMES[2], None] if place == "latents" else [None, None]
    assert samples.rows == {50: left} and sorted(pngs(order)) == list(filter(None, left))
    assert layout.grid.exists() == (place == "latents")
    said = "warning: the sample of `a shape 1` at step 50 is left out: it is NaN or infinite; check"
    assert said in capfd.readouterr().err
