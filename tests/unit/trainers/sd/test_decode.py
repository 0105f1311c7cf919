"""Sample pictures: drawn the same each time, shown in one grid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from latentmake.config.weights import Weights
from latentmake.encode.encoders.vae import load_vae
from latentmake.pages.curves import draw_grid
from latentmake.trainers.loop.order import ClipSettings
from latentmake.trainers.loop.recipe import generator
from latentmake.trainers.sd.recipe import SdPainter
from PIL import Image
from trainer_world import TEXT_WIDTH, make_scheduler, make_unet, make_vae, objective_in

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    make_unet(root / "unet")
    make_vae(root / "vae")
    make_scheduler(root / "scheduler", steps_offset=1)  # the pipeline insists on that
    return root


def _sampled(
    network: Any, objective: Any, *texts: torch.Tensor, shape: tuple[int, ...], **settings: Any
) -> torch.Tensor:
    size = {"width": 16, "height": 16}
    painter: Any = SimpleNamespace(
        network=network,
        objective=objective,
        settings=ClipSettings(**size, **settings),
        dtype=torch.float32,
    )
    noise = torch.randn(shape, generator=generator(3, 0))
    return SdPainter.sample(painter, [{"text": text} for text in texts], noise)


def _texts(*tokens: int) -> list[torch.Tensor]:
    return [
        torch.randn(count, TEXT_WIDTH, generator=generator("text", count, number))
        for number, count in enumerate(tokens)
    ]


def test_sampling_is_that_of_the_pipeline_with_ddim(folder: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    objective = objective_in(folder / "scheduler")
    text, negative = _texts(7, 7)
    steps = {"num_inference_steps": 6, "guidance_scale": 4.0}
    drawn = _sampled(unet, objective, text, negative, shape=(4, 8, 8), **steps)
    pipeline: Any = StableDiffusionPipeline(
        vae=load_vae(Weights(path=str(folder / "vae")), CPU, torch.float32),
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=DDIMScheduler.from_config(objective.schedule.config),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn((1, 4, 8, 8), generator=generator(3, 0))
    expected = pipeline(
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        latents=noise,
        num_inference_steps=6,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    torch.testing.assert_close(drawn[None], expected, rtol=1e-4, atol=1e-5)


def test_guidance_takes_embeddings_of_two_lengths(folder: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    objective = objective_in(folder / "scheduler", prediction_type="v_prediction")
    text, same = _texts(7, 7)
    short = same[:3]

    def draw(*texts: torch.Tensor) -> torch.Tensor:
        steps = {"num_inference_steps": 3, "guidance_scale": 3.0}
        return _sampled(unet, objective, *texts, shape=(4, 4, 8), **steps)

    drawn = draw(text, short)
    assert drawn.shape == (4, 4, 8)
    assert torch.equal(drawn, draw(text, short))
    assert not torch.equal(drawn, draw(text, same))
    assert not torch.equal(drawn, draw(text))


def test_the_grid_has_a_row_a_step_and_a_column_a_prompt() -> None:
    places = [(row, column) for row in (0, 1, 2) for column in (0, 1)]
    colours = {(row, column): (10 + 40 * row, 100, 50 + 60 * column) for row, column in places}
    rows = [
        (f"step {row}", [Image.new("RGB", (16, 8), colours[row, column]) for column in (0, 1)])
        for row in (0, 1, 2)
    ]
    prompts = ["short", "a very long prompt " * 20 + "withawordthatislongerthanthewholecolumn"]
    grid = draw_grid(rows, prompts)
    found = {}
    for place, colour in colours.items():
        mask = Image.new("1", grid.size)
        mask.putdata([pixel == colour for pixel in grid.get_flattened_data()])
        left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)
        assert (right - left, bottom - top) == (128, 64)
        found[place] = left, top
    assert len({left for left, _ in found.values()}) == 2
    assert len({top for _, top in found.values()}) == 3
    assert sorted(found, key=lambda place: found[place][::-1]) == places
    # A header above, a label at the left: something is written there.
    (left, top), (first, second) = found[0, 1], found[1, 0]
    header, label = (left, 0, left + 128, top), (0, second, first, second + 64)
    for box in (header, label):
        assert min(grid.crop(box).convert("L").get_flattened_data()) < 128
