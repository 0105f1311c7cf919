"""A LoRA's files do in other programs what it does in our UNet; files of before are rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers
from latentmake.files import cachefile
from latentmake.files.safetensors import read_head
from latentmake.plan.run_plan import RunPlan
from latentmake.training.loop.plan import reasons
from latentmake.training.loop.result import RunFiles
from latentmake.training.sd import network
from latentmake.training.sd.order import SdOrder
from latentmake.training.sd.recipe import SdRecipe
from safetensors.torch import load_file, save_file
from trainer_world import TEXT_WIDTH, make_manifest, make_order, make_scheduler, train, write_order

pytestmark = pytest.mark.usefixtures("preloading")

LORA, KOHYA = "pytorch_lora_weights.safetensors", "kohya.safetensors"
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rank": 4,
    "alpha": 2.0,
    "target_modules": ["to_q", "to_out.0", "conv1", "proj_in"],
    "learning_rate": 1e-2,
    "save_every_n_steps": 1,
    "samples": {"num_inference_steps": 1},
}


def build(order: SdOrder, root: Path) -> list[str]:
    """Do what the build does, and return the lines of its log."""
    path, log = write_order(order, root / "order.json"), root / "log"
    train(path, log=log, receipt=Path(order.output) / "trained.json", threads=1)
    return log.read_text().splitlines()


def contents(order: SdOrder) -> dict[str, bytes]:
    """Return all files of a run but TensorBoard's."""
    output = Path(order.output)
    files = [path for path in output.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if output / "logs" not in path.parents}


def make_old(file: Path) -> None:
    """Write a LoRA as it was written before: diffusers' older names for attention alone."""
    tensors = {name.removeprefix("unet."): value for name, value in load_file(file).items()}
    convert: Any = convert_state_dict_to_diffusers
    named = {f"unet.{name}": value for name, value in convert(tensors).items()}
    assert any(".lora.down." in name for name in named) and any("lora_A" in name for name in named)
    file.write_bytes(cachefile.serialize(named, read_head(file).metadata))
    file.with_name(KOHYA).unlink()


def write_captions(root: Path, *captions: str) -> None:
    """Write the items of `make_manifest`, with captions in the headers of their texts."""
    make_manifest(root, tokens=(7,) * len(captions))
    for number, caption in enumerate(captions):
        file = root / f"cache/text/{number}.safetensors"
        save_file(load_file(file), file, {"caption": caption})


def test_a_lora_of_before_is_rewritten_once_and_no_step_is_trained(tmp_path: Path) -> None:
    order = make_order(tmp_path, prompts=True, **SETTINGS)
    plan = RunPlan("tiny", {}, lock="d" * 64)
    build(order, tmp_path)
    assert not reasons(order, plan)
    expected, output = contents(order), Path(order.output)
    folders = [output / "saved/step-000001", output / "saved/step-000002", output]
    for folder in folders:
        make_old(folder / LORA)
    old = load_file(output / LORA)
    unet = SdRecipe(order).make_network(channels=4, text_width=TEXT_WIDTH, dtype=torch.float32)
    network.read_copy(unet, output)  # what reads trained weights takes either
    assert reasons(order, plan)
    begun, *lines = build(order, tmp_path)
    assert begun.startswith("tiny: already trained on exactly this")
    assert lines == [
        f"{folder / LORA}: rewritten in peft's names, which diffusers loads whole; {KOHYA} "
        "written; no step trained"
        for folder in folders
    ]
    assert contents(order) == expected
    assert old.keys() != load_file(output / LORA).keys()
    assert not reasons(order, plan)
    assert build(order, tmp_path) == [begun]
    (output / KOHYA).unlink()
    assert build(order, tmp_path) == [
        begun,
        f"{output / LORA}: unchanged; {KOHYA} written; no step trained",
    ]
    assert contents(order) == expected


def test_copies_of_before_are_rewritten_whatever_training_they_are_of(tmp_path: Path) -> None:
    short = make_order(tmp_path, **SETTINGS)
    build(short, tmp_path)
    copy = Path(short.output) / "saved/step-000002"
    expected = (copy / LORA).read_bytes()
    make_old(copy / LORA)
    longer = make_order(tmp_path, **{**SETTINGS, "steps": 3})
    lines = build(longer, tmp_path)
    assert any(line.startswith(f"{copy / LORA}: rewritten") for line in lines)
    assert (copy / LORA).read_bytes() == expected and (copy / KOHYA).is_file()
    assert len(build(longer, tmp_path)) == 1


def test_kohyas_file_does_in_diffusers_what_our_network_does(tmp_path: Path) -> None:
    order = make_order(tmp_path, **SETTINGS)
    build(order, tmp_path)
    ours = SdRecipe(order).make_network(channels=4, text_width=TEXT_WIDTH, dtype=torch.float32)
    network.read_copy(ours, Path(order.output))
    unet: Any = UNet2DConditionModel
    other, plain = (unet.from_pretrained(order.unet.path) for _ in range(2))
    loader: Any = StableDiffusionPipeline
    state, alphas = loader.lora_state_dict(order.output, weight_name=KOHYA)
    loader.load_lora_into_unet(state, alphas, other)
    random = torch.Generator().manual_seed(4)
    given = (
        torch.randn(1, 4, 8, 8, generator=random),
        torch.tensor([700]),
        torch.randn(1, 7, TEXT_WIDTH, generator=random),
    )
    with torch.no_grad():
        expected = ours.unet.eval()(*given).sample
        assert torch.allclose(other(*given).sample, expected, rtol=0, atol=1e-6)
        assert not torch.allclose(plain(*given).sample, expected, rtol=0, atol=1e-3)


def test_kohyas_file_says_what_programs_show(tmp_path: Path) -> None:
    write_captions(tmp_path, "a ring, Sks Style, red", "a cross,sks style", "sks style, red, ,")
    files = RunFiles(order := make_order(tmp_path, **SETTINGS))
    build(order, tmp_path)
    metadata = read_head(files.output / KOHYA).metadata
    assert json.loads(metadata.pop("ss_tag_frequency")) == {
        "shapes": {"a ring": 1, "sks style": 3, "red": 2, "a cross": 1}
    }
    assert metadata == {
        "format": "pt",
        "ss_base_model_version": "sd_v1",
        "ss_network_alpha": "2.0",
        "ss_network_dim": "4",
        "ss_network_module": "networks.lora",
        "ss_output_name": "tiny",
        "ss_sd_model_name": tmp_path.name,
        "ss_v2": "False",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.prediction_type": "epsilon",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": "tiny",
        "modelspec.trigger_phrase": "Sks Style",
    }


def test_a_unet_of_sd_2_and_its_prediction_are_named(tmp_path: Path) -> None:
    make_scheduler(tmp_path / "scheduler", prediction_type="v_prediction")
    order = make_order(tmp_path, **SETTINGS)
    config = tmp_path / "unet/config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "cross_attention_dim": 1024}))
    described = SdRecipe(order)._described()
    assert described["ss_base_model_version"] == "sd_v2_v"
    assert described["modelspec.architecture"] == "stable-diffusion-v2-768-v/lora"
    assert described["modelspec.prediction_type"] == "v"
    assert "modelspec.trigger_phrase" not in described
    assert described["ss_tag_frequency"] == "{}"
