"""The UNet: loaded from what users have, refused with one line where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base.errors import ModelError
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.trainers.loop.state import trained_state
from latentmake.trainers.sd import network
from safetensors.torch import load_file, save_file
from trainer_world import make_unet, unet_inputs

XL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unet(tmp_path_factory.mktemp("network") / "unet")


def test_a_single_file_with_its_configuration_gives_the_network_of_its_folder(
    unet: Path, tmp_path: Path
) -> None:
    single = tmp_path / "model.safetensors"
    single.write_bytes((unet / "diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="set the UNet's `config`"):
        network.load_unet(Weights(path=str(single)))
    weights = Weights(path=str(single), config=str(unet / "config.json"))
    loaded, expected = network.load_unet(weights), network.load_unet(Weights(path=str(unet)))
    assert loaded.config.block_out_channels == expected.config.block_out_channels
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("form", ["folder", "file"])
def test_missing_weights_are_never_made_up(unet: Path, tmp_path: Path, form: str) -> None:
    tensors = load_file(unet / "diffusion_pytorch_model.safetensors")
    tensors.pop("conv_in.weight")
    (tmp_path / "config.json").write_bytes((unet / "config.json").read_bytes())
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(tensors, file)
    with pytest.raises(ModelError) as error:
        network.load_unet(Weights(path=str(tmp_path if form == "folder" else file)))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "architecture", "what"),
    [
        ({"class_embed_type": "timestep"}, None, "needs more conditions than text"),
        (XL, None, "is one of SDXL, and the caches of this model are not"),
        ({}, "sdxl", "is none of SDXL, and the model has 2 text encoders"),
    ],
)
def test_a_unet_of_other_conditions_is_refused(
    tmp_path: Path, changes: dict[str, Any], architecture: str | None, what: str
) -> None:
    make_unet(tmp_path / "unet", **changes)
    with pytest.raises(ModelError, match=what) as error:
        network.load_unet(Weights(path=str(tmp_path / "unet")), architecture)
    assert str(error.value).startswith(f"{tmp_path}/unet: ") and "\n" not in str(error.value)


def test_a_new_lora_changes_nothing_and_trains_float32_over_narrower_weights(unet: Path) -> None:
    loaded = network.load_unet(Weights(path=str(unet)))
    inputs = unet_inputs()
    with torch.no_grad():
        before = loaded(*inputs).sample
        lora = SdTrainer(kind="sd", rank=2)
        network.adapt(network.Denoiser(loaded), lora, torch.float32)
        assert torch.equal(loaded(*inputs).sample, before)
    narrow = network.Denoiser(network.load_unet(Weights(path=str(unet))))
    network.adapt(narrow, SdTrainer(kind="sd", rank=2), torch.bfloat16)
    trained = trained_state(narrow)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert narrow.unet.conv_in.weight.dtype == torch.bfloat16
