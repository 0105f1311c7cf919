"""musubi-tuner's own code does with our LoRA's files what our network does with the LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Find, output_of
from dit_world import inputs, original_dit, tiny_dit, write_file
from latentmake.trainers.lora import add_adapter, lora_tensors
from latentmake.trainers.wan.dit import lora_names
from latentmake.trainers.wan.recipe import write_lora
from safetensors.torch import load_file

pytestmark = pytest.mark.real_trainer

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
# Loads the network in its original names, and applies and merges a LoRA as musubi-tuner does.
SCRIPT = """
import json, sys
import torch
from musubi_tuner import convert_lora
from musubi_tuner.networks import lora_wan
from musubi_tuner.utils.lora_utils import load_safetensors_with_lora_and_fp8
from musubi_tuner.wan.modules.model import WanModel
from safetensors.torch import load_file, save_file

def make():
    model = WanModel(
        model_type="t2v", model_version="2.1", dim=24, ffn_dim=40, freq_dim=32, text_dim=24,
        in_dim=16, out_dim=16, num_heads=2, num_layers=2, text_len=7, attn_mode="torch",
        split_attn=False)
    model.load_state_dict(load_file("dit.safetensors"), strict=True)
    return model.eval().requires_grad_(False)

def predict(model):
    latents, timestep, text = (given[name] for name in (
        "hidden_states", "timestep", "encoder_hidden_states"))
    return torch.stack(model(list(latents), timestep, list(text), seq_len=3 * 2 * 3))

given = load_file("inputs.safetensors")
found = {"base": predict(make())}
convert_lora.convert("comfyui.safetensors", "converted.safetensors", "default", None)
for name in ("musubi", "converted"):
    lora = load_file(f"{name}.safetensors")
    model = make()
    network = lora_wan.create_arch_network_from_weights(1.0, lora, unet=model)
    network.apply_to(None, model, apply_text_encoder=False)
    missing, unexpected = network.load_state_dict(lora, strict=True)
    found[f"{name} applied"] = predict(model)
    model = make()
    network = lora_wan.create_arch_network_from_weights(1.0, lora, unet=model, for_inference=True)
    network.merge_to(None, model, lora, device="cpu")
    found[f"{name} merged"] = predict(model)
    save_file(model.state_dict(), f"{name} merged.safetensors")
outer = load_safetensors_with_lora_and_fp8(  # as wan_generate_video.py loads a network
    "dit.safetensors", [load_file("outer/musubi.safetensors")], [1.0], False, torch.device("cpu"))
save_file(outer, "outer merged.safetensors")
own = lora_wan.create_arch_network(1.0, 4, 2, None, None, make())
own.apply_to(None, None, apply_text_encoder=False)
save_file({name: value.contiguous() for name, value in found.items()}, "found.safetensors")
json.dump(sorted(own.state_dict()), open("keys.json", "w"))
"""


def test_musubi_tuner_applies_and_merges_the_lora_that_we_trained(
    tmp_path: Path, trainer: Find
) -> None:
    tuner = trainer("musubi-tuner", "wan_train_network.py")
    folder = tmp_path / "work"
    dit = tiny_dit()
    given = inputs(dit)
    write_file(original_dit(dit.state_dict()), folder / "dit.safetensors")
    write_file(given, folder / "inputs.safetensors")
    base = dit(**given).sample
    outer = tiny_dit()
    for network, layers, place in (
        (dit, TARGETS, folder),
        (outer, [*TARGETS, "proj_out"], folder / "outer"),
    ):
        add_adapter(network, rank=4, alpha=2, target_modules=layers)
        with torch.no_grad():
            for value in lora_tensors(network).values():
                value.copy_(0.2 * torch.randn(value.shape))
        write_lora(network, place)
    expected = dit(**given).sample
    (folder / "apply.py").write_text(SCRIPT)
    output_of(tuner.python, "apply.py", cwd=folder, **tuner.environment())
    found = load_file(folder / "found.safetensors")
    assert len(found) == 5
    assert (expected - base).abs().max() > 0.1
    for name, value in found.items():  # musubi-tuner's attention computes in bfloat16
        ours = base if name == "base" else expected
        assert (value - ours).abs().max() < 0.02, name
    for network in (dit, outer):
        network.fuse_lora()
        network.unload_lora()
    for name, network in (("musubi", dit), ("converted", dit), ("outer", outer)):
        merged = load_file(folder / f"{name} merged.safetensors")
        for key, value in original_dit(network.state_dict()).items():
            assert torch.allclose(merged[key], value, rtol=0, atol=1e-6), key
    keys = json.loads((folder / "keys.json").read_text())
    assert sorted(load_file(folder / lora_names()[1])) == keys
