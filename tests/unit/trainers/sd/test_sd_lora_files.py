"""A LoRA's files do in other programs what it does in our UNet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers
from latentmake.base.errors import TrainingError
from latentmake.formats.safetensors import read_head
from latentmake.runs.order import Record, RunFiles
from latentmake.trainers.loop.state import trained_state
from latentmake.trainers.sd.recipe import SdRecipe
from latentmake.trainers.sd.unet import SdOrder
from safetensors.torch import load_file, save_file
from trainer_world import (
    TEXT_WIDTH,
    make_order,
    make_scheduler,
    make_training,
    make_unet,
    unet_inputs,
)

LORA, KOHYA = "pytorch_lora_weights.safetensors", "kohya.safetensors"
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rank": 4,
    "alpha": 2.0,
    "target_modules": ["to_q", "to_out.0", "conv1", "proj_in"],
    "learning_rate": 1e-2,
}


def read_copy(order: SdOrder) -> Any:
    """Return the network with the weights that were trained."""
    recipe = SdRecipe(order)
    unet = recipe.make_network(channels=4, text_width=TEXT_WIDTH, dtype=torch.float32)
    recipe.read_copy(unet, RunFiles(order).results)
    return unet


def test_a_lora_in_diffusers_older_names_is_read(tmp_path: Path) -> None:
    order = make_order(tmp_path, **SETTINGS)
    make_training(order).run()
    file = Path(order.output, LORA)

    expected = trained_state(read_copy(order))
    tensors = {name.removeprefix("unet."): value for name, value in load_file(file).items()}
    convert: Any = convert_state_dict_to_diffusers
    named = {f"unet.{name}": value for name, value in convert(tensors).items()}
    save_file(named, file, read_head(file).metadata)
    assert any(".lora.down." in name for name in load_file(file))
    found = trained_state(read_copy(order))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("prefix", ["unet.", ""])
def test_a_lora_of_old_attention_processors_does_here_what_it_does_in_diffusers(
    tmp_path: Path, prefix: str
) -> None:
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    order = make_order(tmp_path, **SETTINGS | {"target_modules": layers, "alpha": 4.0})
    make_training(order).run()
    old, named = Path(order.output, "old.safetensors"), dict[str, torch.Tensor]()
    for name, value in load_file(Path(order.output, LORA)).items():
        layer, matrix, _ = name.removeprefix("unet.").rsplit(".", 2)
        block, _, part = layer.removesuffix(".0").rpartition(".")
        half = "down" if matrix == "lora_A" else "up"
        named[f"{prefix}{block}.processor.{part}_lora.{half}.weight"] = value
    save_file(named, old)
    unet: Any = UNet2DConditionModel.from_pretrained(order.unet.path)
    unet.load_lora_adapter(load_file(old), prefix=prefix.removesuffix(".") or None)
    given = unet_inputs()
    recipe = SdRecipe(order)
    sizes: Any = {"channels": 4, "text_width": TEXT_WIDTH, "dtype": torch.float32}
    drawing = recipe.make_network(**sizes, plain=True)
    recipe.read_copy(drawing, [old])
    further = make_order(
        tmp_path,
        output="further",
        **SETTINGS | {"target_modules": layers, "alpha": 1.0, "init_lora": str(old)},
    )
    begun = SdRecipe(further).make_network(**sizes)
    with torch.no_grad():
        expected = unet(*given).sample
        for network in (drawing, begun):
            assert torch.allclose(network.unet.eval()(*given).sample, expected, rtol=0, atol=1e-6)
    save_file({f"{name}.other": value for name, value in named.items()}, old)
    with pytest.raises(TrainingError, match="in the names of diffusers"):
        recipe.read_copy(recipe.make_network(**sizes, plain=True), [old])


def test_kohyas_file_does_in_diffusers_what_our_network_does(tmp_path: Path) -> None:
    order = make_order(tmp_path, **SETTINGS, metadata="none")
    make_training(order).run()
    ours = read_copy(order)
    unet: Any = UNet2DConditionModel
    other, plain = (unet.from_pretrained(order.unet.path) for _ in range(2))
    loader: Any = StableDiffusionPipeline
    state, alphas = loader.lora_state_dict(order.output, weight_name=KOHYA)
    loader.load_lora_into_unet(state, alphas, other)
    given = unet_inputs()
    with torch.no_grad():
        expected = ours.unet.eval()(*given).sample
        assert torch.allclose(other(*given).sample, expected, rtol=0, atol=1e-6)
        assert not torch.allclose(plain(*given).sample, expected, rtol=0, atol=1e-3)
    assert read_head(Path(order.output, KOHYA)).metadata == {
        "format": "pt",
        "ss_base_model_version": "sd_v1",
        "ss_network_alpha": "2.0",
        "ss_network_dim": "4",
        "ss_network_module": "networks.lora",
        "ss_output_name": "tiny",
        "ss_sd_model_name": tmp_path.name,
        "ss_v2": "False",
    }


def test_a_training_begins_with_what_a_lora_does(tmp_path: Path) -> None:
    first = make_order(tmp_path, **SETTINGS)
    make_training(first).run()
    ends = json.loads(RunFiles(first).record.read_text())["loss_end"]
    for name in (LORA, KOHYA, ""):  # the last is the run's folder
        settings = {**SETTINGS, "alpha": 5.0, "init_lora": str(Path(first.output, name))}
        order = make_order(tmp_path, output="further", **settings)
        make_training(order).run()
        record = json.loads(RunFiles(order).record.read_text())
        assert record["loss_start"] == pytest.approx(ends, rel=1e-5)
        assert record["loss_end"] != record["loss_start"]
        RunFiles(order).record.unlink()
        shutil.rmtree(RunFiles(order).checkpoints)


def test_a_unet_of_sd_2_and_its_prediction_are_named(tmp_path: Path) -> None:
    make_scheduler(tmp_path / "scheduler", prediction_type="v_prediction")
    make_unet(tmp_path / "unet", cross_attention_dim=1024)
    recipe = SdRecipe(make_order(tmp_path, **SETTINGS))
    unet = recipe.make_network(channels=4, text_width=1024, dtype=torch.float32)
    recipe.write_copy(unet, tmp_path / "copy", Record(parts={}, seconds=0), 2)
    described = read_head(tmp_path / "copy" / KOHYA).metadata
    assert described["ss_base_model_version"] == "sd_v2_v" and described["ss_v2"] == "True"
