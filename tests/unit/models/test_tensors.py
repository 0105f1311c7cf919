"""Tensors that a configuration implies are those that the libraries' own classes have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, UNet2DConditionModel, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
)
from latentmake.models import tensors
from latentmake.models.checkpoints import vae_config
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

XL: dict[str, Any] = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
    "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
UNETS: dict[str, dict[str, Any]] = {
    "sd1": {"cross_attention_dim": 768},
    "sd2": {"cross_attention_dim": 1024, "use_linear_projection": True},
    "inpainting": {"in_channels": 9, "cross_attention_dim": 768},
    "sdxl": XL,
    "tiny": {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
    },
}
VAES: dict[str, dict[str, Any]] = {
    name: {
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "layers_per_block": layers,
        **further,
    }
    for name, channels, layers, further in (
        ("sd", (128, 256, 512, 512), 2, {}),
        ("sd3", (128, 256, 512, 512), 2, {"latent_channels": 16, "use_quant_conv": False}),
        ("tiny", (32, 64), 1, {"mid_block_add_attention": False, "use_post_quant_conv": False}),
    )
}


def shapes(network: torch.nn.Module) -> tensors.Shapes:
    return {name: tuple(each.shape) for name, each in network.state_dict().items()}


def empty(found: tensors.Shapes) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return {name: torch.empty(shape) for name, shape in found.items()}


@pytest.mark.parametrize("name", UNETS)
def test_a_unet_has_the_tensors_of_its_class_in_both_kinds_of_names(name: str) -> None:
    with torch.device("meta"):
        network: Any = UNet2DConditionModel(**UNETS[name])
    config = dict(network.config)
    found = tensors.unet(config)
    assert found == shapes(network)
    original = tensors.renamed(found, tensors.original_unet_layer, config)
    prefixed = {f"model.diffusion_model.{key}": value for key, value in empty(original).items()}
    assert convert_ldm_unet_checkpoint(prefixed, config).keys() == found.keys()


@pytest.mark.parametrize("name", VAES)
def test_a_vae_has_the_tensors_of_its_class_in_both_kinds_of_names(name: str) -> None:
    with torch.device("meta"):
        network: Any = AutoencoderKL(**VAES[name])
    config = dict(network.config)
    found = tensors.vae(config)
    assert found == shapes(network)
    original = tensors.renamed(found, tensors.original_vae_layer, config)
    for own in (found, original):
        assert tensors.vae(vae_config(own) | {"mid_block_add_attention": name != "tiny"}) == found
    if name != "tiny":  # diffusers' conversion wants attention
        converted = convert_ldm_vae_checkpoint(empty(original), config)
        assert converted.keys() == found.keys()


@pytest.mark.parametrize("projects", [False, True])
def test_a_clip_has_the_tensors_of_its_class(projects: bool) -> None:
    config = CLIPTextConfig(hidden_size=64, num_hidden_layers=2, projection_dim=48)
    with torch.device("meta"):
        network = (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)
    own = {name.removeprefix("text_model."): each for name, each in shapes(network).items()}
    own.pop("embeddings.position_ids", None)
    assert dict(tensors.clip(config.to_dict(), projects=projects)) == own


@pytest.mark.parametrize("gated", ["relu", "gated-gelu"])
@pytest.mark.parametrize("every_bias", [False, True])
def test_a_t5_has_the_tensors_of_its_class(every_bias: bool, gated: str) -> None:
    kind, network = (UMT5Config, UMT5EncoderModel) if every_bias else (T5Config, T5EncoderModel)
    config = kind(num_layers=2, d_model=32, d_kv=8, d_ff=48, num_heads=2, feed_forward_proj=gated)
    with torch.device("meta"):
        own = shapes(network(config))
    own.pop("encoder.embed_tokens.weight")
    assert dict(tensors.t5(config.to_dict(), every_bias=every_bias)) == own


@pytest.mark.parametrize("places", [None, 10])
@pytest.mark.parametrize("image", [None, 20])
def test_a_wan_dit_has_the_tensors_of_its_class(image: int | None, places: int | None) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 24}
    sizes |= {"freq_dim": 32, "ffn_dim": 40, "num_layers": 2, "in_channels": 36}
    if image:
        sizes |= {"image_dim": image, "added_kv_proj_dim": 24, "pos_embed_seq_len": places}
    with torch.device("meta"):
        network: Any = WanTransformer3DModel(**sizes)
    assert dict(tensors.wan_dit(network.config)) == shapes(network)


@pytest.mark.parametrize(
    "config",
    [{}, {"dim_mult": [1, 2, 4], "temperal_downsample": [True, False], "num_res_blocks": 3}],
)
def test_a_wan_vae_has_the_tensors_of_its_class(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = AutoencoderKLWan(base_dim=8, **config)
    assert {*tensors.wan_vae(network.config)} == network.state_dict().keys()
    assert {*tensors.wan_vae(config)} == network.state_dict().keys()


def test_blocks_of_another_kind_imply_nothing() -> None:
    with torch.device("meta"):
        config = dict(UNet2DConditionModel(**UNETS["tiny"]).config)
    assert tensors.unet(config | {"dual_cross_attention": True}) is None
    assert tensors.unet(config | {"down_block_types": ["AttnDownBlock2D"] * 2}) is None
