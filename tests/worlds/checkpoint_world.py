"""Small models of Stable Diffusion, as the folder of a pipeline and as one checkpoint file.

The names of LDM are made here by rules of their own, backwards to diffusers' converters.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import tiny_networks
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
)

Kind = Literal["sd1", "sd2", "sdxl"]
State = dict[str, torch.Tensor]
T = TypeVar("T")
_WIDTHS = {"sd1": 768, "sd2": 128, "sdxl": 128}  # heads are told by the first
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_ATTENTION = {
    "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"
}  # fmt: skip
_OPEN = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def write(folder: Path, file: Path, tokenizer: Path, kind: Kind = "sd1") -> None:
    """Write a small model as a pipeline's folder and as a checkpoint.

    Args:
        folder: of the pipeline.
        file: of the checkpoint.
        tokenizer: folder of the one that all text encoders get.
        kind: of the model.
    """
    torch.manual_seed(7)
    width = _WIDTHS[kind]
    _vae(kind).save_pretrained(folder / "vae")
    _text(width, kind == "sd2", False, tokenizer).save_pretrained(folder / "text_encoder")
    if kind == "sdxl":
        _text(2 * width, True, True, tokenizer).save_pretrained(folder / "text_encoder_2")
    _unet(width if kind != "sdxl" else 3 * width, kind).save_pretrained(folder / "unet")
    DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    ).save_pretrained(folder / "scheduler")
    for name in ("tokenizer", "tokenizer_2")[: 2 if kind == "sdxl" else 1]:
        shutil.copytree(tokenizer, folder / name)
        if kind == "sd2" or name == "tokenizer_2":
            padded = AutoTokenizer.from_pretrained(folder / name)
            padded.pad_token = padded.convert_ids_to_tokens(0)
            padded.save_pretrained(folder / name)
    save_file({k: v.contiguous() for k, v in checkpoint(folder, kind).items()}, file)


def _vae(kind: Kind) -> AutoencoderKL:
    own = {"scaling_factor": 0.13025, "force_upcast": True} if kind == "sdxl" else {}
    vae = tiny_networks.vae((32, 32, 64, 64), norm_num_groups=32, **own)
    if kind != "sdxl":  # as in the published configurations
        vae._internal_dict = type(vae.config)(
            {k: v for k, v in vae.config.items() if k != "force_upcast"}
        )
    return vae


def _text(width: int, gelu: bool, projects: bool, tokenizer: Path) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)),
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        hidden_act="gelu" if gelu else "quick_gelu",
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=2,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def _unet(width: int, kind: Kind) -> UNet2DConditionModel:
    own = {}
    if kind == "sdxl":
        own = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 1536 + 2 * _WIDTHS[kind],
            "transformer_layers_per_block": [1, 2],
        }
    return tiny_networks.unet(
        (64, 128),
        width,
        (True, True),
        sample_size=8,
        attention_head_dim=8 if kind == "sd1" else (1, 2),
        use_linear_projection=kind != "sd1",
        **own,
    )


def checkpoint(folder: Path, kind: Kind) -> State:
    """Return the weights of a pipeline's folder in the names of LDM."""
    parts = {part.name: load_file(next(part.glob("*.safetensors"))) for part in folder.iterdir()
             if next(part.glob("*.safetensors"), None)}  # fmt: skip
    found = {f"model.diffusion_model.{k}": v for k, v in of_unet(parts["unet"]).items()}
    found |= {f"first_stage_model.{k}": v for k, v in whole_vae(parts["vae"]).items()}
    first = {
        "text_model." + name.removeprefix("text_model."): value
        for name, value in parts["text_encoder"].items()
    }
    if kind == "sd2":
        return found | of_open_clip(first, "cond_stage_model.model.")
    prefix = "conditioner.embedders.0." if kind == "sdxl" else "cond_stage_model."
    found |= {f"{prefix}transformer.{name}": value for name, value in first.items()}
    if kind == "sdxl":
        found |= of_open_clip(parts["text_encoder_2"], "conditioner.embedders.1.model.")
    return found


def of_unet(state: Mapping[str, T]) -> dict[str, T]:
    """Return what stands under a UNet's names under those of LDM."""
    layers = len({name.split(".")[3] for name in state if "down_blocks.0.resnets." in name})
    return {_of_unet(name, layers, state): value for name, value in state.items()}


def _of_unet(name: str, layers: int, known: Mapping[str, Any]) -> str:
    layer, _, ending = name.rpartition(".")
    if layer in _OUTSIDE:
        return f"{_OUTSIDE[layer]}.{ending}"
    name = name.replace("add_embedding.linear_1", "label_emb.0.0")
    name = name.replace("add_embedding.linear_2", "label_emb.0.2")
    step = layers + 1

    def block(match: re.Match[str]) -> str:
        half, number, part, at = match[1], int(match[2]), match[3], int(match[4])
        if half == "down":
            place = {"resnets": (1 + at, 0), "attentions": (1 + at, 1), "downsamplers": (step, 0)}
            index, inner = place[part]
            return f"input_blocks.{number * step + index}.{inner}"
        attends = any(each.startswith(f"up_blocks.{number}.attentions") for each in known)
        place = {"resnets": (at, 0), "attentions": (at, 1), "upsamplers": (layers, 1 + attends)}
        index, inner = place[part]
        return f"output_blocks.{number * step + index}.{inner}"

    name = re.sub(r"^(down|up)_blocks\.(\d+)\.([a-z]+)\.(\d+)", block, name)
    name = re.sub(r"^(input_blocks\.\d+\.0)\.conv\.", r"\1.op.", name)
    name = re.sub(
        r"^mid_block\.(resnets|attentions)\.(\d)",
        lambda m: f"middle_block.{1 if m[1] == 'attentions' else 2 * int(m[2])}",
        name,
    )
    for new, old in _RESNET.items():
        if "_block" in name and "transformer_blocks" not in name:
            name = re.sub(rf"\.{new}\.", f".{old}.", name)
    return name


def whole_vae(state: Mapping[str, torch.Tensor], blocks: int = 4) -> State:
    """Return the weights of a VAE in the names of LDM, whose attention is made of convolutions."""
    return {
        of_vae(name, blocks): (value[:, :, None, None] if value.dim() == 2 else value).contiguous()
        for name, value in state.items()
    }


def of_vae(name: str, blocks: int = 4) -> str:
    """Return a VAE's name of LDM."""
    name = re.sub(r"encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.down.\1.block.", name)
    name = re.sub(
        r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)",
        lambda m: f"decoder.up.{blocks - 1 - int(m[1])}.{m[2]}",
        name,
    )
    name = name.replace(".resnets.", ".block.").replace("upsamplers.0.", "upsample.")
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample.", name)
    name = re.sub(r"mid_block\.block\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
    if "attentions" in name:
        name = name.replace("mid_block.attentions.0", "mid.attn_1")
        for new, old in _ATTENTION.items():
            name = name.replace(f".{new}.", f".{old}.")
    return name


def of_open_clip(state: State, prefix: str) -> State:
    """Return a CLIP in the names of OpenCLIP."""
    state = {name.removeprefix("text_model."): value for name, value in state.items()}
    found: State = {}
    for name, value in state.items():
        if name == "text_projection.weight":
            found["text_projection"] = value.T
        elif match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
            block = f"transformer.resblocks.{match[1]}"
            if match[2] in _OPEN:
                found[f"{block}.{_OPEN[match[2]]}.{match[3]}"] = value
            elif match[2] == "self_attn.q_proj":
                layer = f"encoder.layers.{match[1]}.self_attn"
                parts = [state[f"{layer}.{x}_proj.{match[3]}"] for x in "qkv"]
                found[f"{block}.attn.in_proj_{match[3]}"] = torch.cat(parts)
        else:
            found[
                {
                    "embeddings.token_embedding.weight": "token_embedding.weight",
                    "embeddings.position_embedding.weight": "positional_embedding",
                }.get(name, name.replace("final_layer_norm", "ln_final"))
            ] = value
    return {prefix + name: value for name, value in found.items()}
