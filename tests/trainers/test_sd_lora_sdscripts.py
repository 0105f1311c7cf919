"""sd-scripts' own code does with our LoRA's file what our network does, and reads its header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Find, output_of
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.runs.order import RunFiles
from latentmake.trainers.lora import kohya_bytes, lora_tensors
from latentmake.trainers.sd import network
from latentmake.trainers.sd.unet import KOHYA_WEIGHTS, places_of
from safetensors.torch import load_file, save_file
from trainer_world import TEXT_WIDTH, make_unet, trained

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

# All layers that sd-scripts trains when it has a `conv_dim`.
TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv"),
]
# Loads the UNet of Stable Diffusion 1.x, made small, and applies a LoRA as sd-scripts does.
SCRIPT = """
import json, sys
import torch, transformers
processor = transformers.CLIPImageProcessor  # puts another module in its place
sys.modules["transformers"].CLIPFeatureExtractor = processor
from library import original_unet
original_unet.BLOCK_OUT_CHANNELS = (32, 32, 32, 32)
original_unet.TIMESTEP_INPUT_DIM, original_unet.TIME_EMBED_DIM = 32, 128
original_unet.LAYERS_PER_BLOCK, original_unet.LAYERS_PER_BLOCK_UP = 1, 2
original_unet.NORM_GROUPS = original_unet.TRANSFORMER_NORM_NUM_GROUPS = 8
from networks import lora
from safetensors.torch import load_file, save_file

def make():
    unet = original_unet.UNet2DConditionModel(
        sample_size=8, attention_head_dim=8, cross_attention_dim=16)
    unet.load_state_dict(load_file("unet.safetensors"), strict=True)
    return unet.eval().requires_grad_(False)

given = load_file("inputs.safetensors")
call = lambda unet: unet(given["latents"], given["timestep"], given["text"]).sample
found, unet = {"base": call(make())}, make()
network, weights = lora.create_network_from_weights(1.0, "kohya.safetensors", None, [], unet)
network.apply_to([], unet, apply_text_encoder=False, apply_unet=True)
network.load_state_dict(weights, strict=True)
found["applied"] = call(unet)
unet = make()
own = lora.create_network(1.0, 4, 2.0, None, [], unet, conv_dim=4, conv_alpha=2.0)
own.apply_to([], unet, apply_text_encoder=False, apply_unet=True)
save_file({name: value.contiguous() for name, value in found.items()}, "found.safetensors")
json.dump(sorted(own.state_dict()), open("keys.json", "w"))
"""


def _predicted(unet: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = unet.eval()(given["latents"], given["timestep"], given["text"]).sample
    return found


def test_sd_scripts_applies_the_lora_that_we_trained(tmp_path: Path, trainer: Find) -> None:
    scripts = trainer("sd-scripts", "train_network.py")
    make_unet(
        tmp_path / "unet",
        block_out_channels=(32, 32, 32, 32),
        down_block_types=(*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        up_block_types=("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
    )
    random = torch.Generator().manual_seed(4)
    given = {
        "latents": torch.randn(2, 4, 8, 8, generator=random),
        "timestep": torch.tensor([3, 700]),
        "text": torch.randn(2, 7, TEXT_WIDTH, generator=random),
    }
    denoiser = network.Denoiser(network.load_unet(Weights(path=str(tmp_path / "unet"))))
    save_file(denoiser.unet.state_dict(), tmp_path / "unet.safetensors")
    save_file(given, tmp_path / "inputs.safetensors")
    base = _predicted(denoiser.unet, given)
    settings = SdTrainer(kind="sd", rank=4, alpha=2.0, target_modules=TARGETS)
    network.adapt(denoiser, settings, torch.float32)
    with torch.no_grad():
        for value in lora_tensors(denoiser.unet).values():
            value.copy_(0.2 * torch.randn(value.shape, generator=random))
    _, place, _ = places_of(denoiser.unet.config)
    (tmp_path / "kohya.safetensors").write_bytes(kohya_bytes(denoiser.unet, place))
    (tmp_path / "apply.py").write_text(SCRIPT)
    output_of(scripts.python, "apply.py", cwd=tmp_path, **scripts.environment())
    found, expected = load_file(tmp_path / "found.safetensors"), _predicted(denoiser.unet, given)
    assert (expected - base).abs().max() > 0.1
    assert torch.allclose(found["base"], base, rtol=0, atol=1e-5)
    assert torch.allclose(found["applied"], expected, rtol=0, atol=1e-4)
    keys = json.loads((tmp_path / "keys.json").read_text())
    assert sorted(load_file(tmp_path / "kohya.safetensors")) == keys


def test_the_tool_that_shows_metadata_shows_ours(tmp_path: Path, trainer: Find) -> None:
    scripts = trainer("sd-scripts", "train_network.py")
    order = trained(tmp_path, steps=1, title="My cats", trigger="sks cat")
    weights = RunFiles(order).output / KOHYA_WEIGHTS
    (tmp_path / "show.py").write_text(
        "import runpy, sys\n"
        "from library import sai_model_spec\n"
        f"sys.argv[1:] = ['--model', {str(weights)!r}]\n"
        f"runpy.run_path({str(scripts.folder / 'tools/show_metadata.py')!r})\n"
        "metadata = sai_model_spec.load_metadata_from_safetensors(sys.argv[2])\n"
        "print(sai_model_spec.get_title(metadata))\n"
    )
    shown = output_of(scripts.python, "show.py", cwd=tmp_path, **scripts.environment())
    said, title = json.JSONDecoder().raw_decode(shown[shown.index("{") :])[0], "My cats"
    assert said["modelspec.title"] == title and said["modelspec.trigger_phrase"] == "sks cat"
    assert said["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert shown.splitlines()[-1] == title
