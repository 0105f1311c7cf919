"""Pictures that follow a training, and losses on items that did not train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake.base import atomic, digest
from latentmake.base.errors import TrainingError
from latentmake.formats import cachefile
from latentmake.formats.safetensors import read_head
from latentmake.runs.order import RunFiles
from latentmake.runs.results import INDEX, GenerationIndex
from latentmake.trainers.loop.generation import (
    EvaluationOrder,
    GenerationOrder,
    clip_name,
    clip_reasons,
)
from latentmake.trainers.loop.recipe import generator
from latentmake.trainers.sd.recipe import SdRecipe
from latentmake.trainers.sd.unet import SdOrder
from PIL import Image
from safetensors.torch import load_file, save_file
from trainer_world import follow, make_generation, make_order, make_training

SETTINGS: dict[str, Any] = {
    "steps": 3,
    "learning_rate": 3e-2,
    "save_every_n_steps": 2,
    "samples": {"num_inference_steps": 2, "guidance_scale": 2.0, "seed": 5},
}


def trained(root: Path, **changes: Any) -> SdOrder:
    order = make_order(root, prompts=True, **{**SETTINGS, **changes})
    make_training(order).run()
    return order


def files(order: GenerationOrder) -> dict[str, tuple[bytes, int]]:
    folder = Path(order.output)
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.png")
    }


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_pictures_are_the_samples_of_the_training(adapter: str, tmp_path: Path) -> None:
    training = trained(tmp_path, adapter=adapter)
    order = make_generation(training)
    assert clip_reasons(order)
    follow(order)
    assert not clip_reasons(order)
    samples, folder = RunFiles(training).samples, Path(order.output)
    for number, prompt in enumerate(training.prompts):
        for used, step in ((False, 0), (True, 3)):
            name = clip_name(prompt.prompt, 5, adapter=used, suffix=".png")
            sample = pixels(samples / f"step-{step:06d}_{number:02d}.png")
            assert np.abs(pixels(folder / name) - sample).max() <= 1
    index = GenerationIndex.read(folder / INDEX)
    assert index is not None and "frames" not in index.settings
    assert len({content for content, _ in files(order).values()}) == 4


def test_a_saved_lora_is_drawn_with_and_its_strength_counts(tmp_path: Path) -> None:
    training = trained(tmp_path)
    saved = Path(training.output, "saved/step-000002/pytorch_lora_weights.safetensors")
    drawn = []
    for strength in (1.0, 0.5):
        order = make_generation(
            training, lora=str(saved.parent), adapters=[str(saved)], strength=strength
        )
        follow(order)
        drawn.append(files(order))
    adapter, base, *_ = sorted(drawn[0])
    assert base.endswith("_base.png") and adapter.endswith("_adapter.png")
    assert drawn[0][base] == drawn[1][base] and drawn[0][adapter] != drawn[1][adapter]
    saved.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"; correct runs\.tiny\.generate\.lora"):
        follow(order)


def test_a_picture_of_nan_is_left_out_and_named_and_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = trained(tmp_path)
    weights = RunFiles(training).weights
    data, head = load_file(weights), read_head(weights)
    save_file({x: value * math.nan for x, value in data.items()}, weights, head.metadata)
    order = make_generation(training)
    with pytest.raises(TrainingError) as error:
        follow(order)
    said = "run tiny: 2 of 4 pictures are NaN or infinite and left out; lower `learning_rate`"
    assert str(error.value).startswith(said)
    assert [name[-9:] for name in files(order)] == ["_base.png", "_base.png"]
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("warning: ")]
    assert len(lines) == 2 and all(
        f"_adapter.png (`{each.prompt}`): this picture is NaN or infinite" in line
        for each, line in zip(training.prompts, lines, strict=True)
    )


def hold_out(root: Path) -> None:
    """Make the caches ours, with keys, and hold the last item out."""
    for path in root.glob("cache/**/*.safetensors"):
        key = digest.of_file(path)
        made = cachefile.stamp(key=key, source=key, recipe={}) | {"caption": path.stem}
        metadata = dict(read_head(path).metadata)
        atomic.write(path, cachefile.serialize(load_file(path), metadata | made))
    manifest = root / "manifest.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[2]["validation"] = True
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_an_evaluation_has_the_losses_of_the_objective_and_pictures(
    adapter: str, tmp_path: Path
) -> None:
    make_order(tmp_path, prompts=True)
    hold_out(tmp_path)
    training = trained(tmp_path, adapter=adapter)
    order = make_generation(training, EvaluationOrder, prompts=[], clips=1, resolution="16")
    metrics = follow(order)
    assert metrics is not None and follow(order) is None
    assert [each.name for each in metrics.results] == ["shapes/item2 16", "shapes/item2 16x8"]
    first, second = metrics.results
    assert set(first.clips) == {"real", "base", "adapter"} and not second.clips
    assert {(each.width, each.height, each.frames) for each in first.clips.values()} == {
        (16, 16, 1)
    }
    assert {path.suffix for path in Path(order.output).iterdir()} == {".png", ".json"}
    assert metrics.loss["base"] != metrics.loss["adapter"]

    recipe = SdRecipe(training)
    objective, timestep = recipe.objective(recipe.order), int(metrics.timesteps[4])
    network = recipe.make_network(channels=4, text_width=16, dtype=torch.float32).eval()
    path = tmp_path / "cache/16/2.safetensors"
    latents = (load_file(path)["latents"][None] - 0.25) * 0.5
    noise = torch.randn(
        latents.shape, generator=generator("evaluation", read_head(path).metadata[cachefile.KEY], 4)
    )
    text = load_file(tmp_path / "cache/text/2.safetensors")["text_encoder.hidden_state"][None]
    times = torch.tensor([timestep])
    with torch.no_grad():
        noisy = objective.schedule.add_noise(latents, noise, times)
        (predicted,) = network(noisy, times, text, return_dict=False)
    expected = float(((predicted - noise) ** 2).mean())
    assert first.losses["base"].values[4] == pytest.approx(expected, rel=1e-4)
