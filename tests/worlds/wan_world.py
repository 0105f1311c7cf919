"""Tiny Wan encoders with random weights, in the names of the original release and as folders."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo.text import t5_tokenizer
from diffusers import AutoencoderKLWan
from latentmake.base.errors import ModelError
from refusals import refused
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

State = dict[str, torch.Tensor]

CAPTIONS = ["a red circle", "two blue squares on a brown table", "", "circle " * 40]


def shuffled(network: torch.nn.Module, spread: float = 0.1) -> torch.nn.Module:
    """Move every weight off its start, so that ones and zeros do not hide a mistaken name."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight += spread * torch.randn(weight.shape, generator=generator)
    return network.eval()


def save_original(state: State, stem: Path) -> dict[str, Path]:
    """Write one table of weights as .pth and as .safetensors."""
    state = {name: value.contiguous().clone() for name, value in state.items()}
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = {suffix: stem.with_name(stem.name + suffix) for suffix in (".pth", ".safetensors")}
    torch.save(state, paths[".pth"])
    save_file(state, paths[".safetensors"])
    return paths


def refusal(load: Callable[[], object]) -> str:
    """Return the one line in which weights are refused."""
    line = refused(load, kind=ModelError)
    assert "meta tensor" not in line
    return line


def assert_damaged_are_refused(
    load: Callable[[Path], object], good: dict[str, Path], root: Path
) -> None:
    """Files that no network can be read from are refused, each for what is the matter with it."""
    for fault, path in write_damaged(root, good).items():
        line = refusal(lambda path=path: load(path))
        assert line.startswith(f"{path}: ")
        assert fault.partition(" (")[0] in line


def write_damaged(root: Path, good: dict[str, Path]) -> dict[str, Path]:
    """Write files that no network can be read from, by what is the matter with them."""
    root.mkdir(exist_ok=True)
    found = {"does not exist": root / "missing.pth"}
    for suffix in (".pth", ".safetensors"):
        whole = good[suffix].read_bytes()
        for length in (0, 10, len(whole) // 2, len(whole) - 1):
            path = root / f"cut{length}{suffix}"
            path.write_bytes(whole[:length])
            found[f"is cut short ({length}{suffix})"] = path
    for name, content in {
        "is cut short or no PyTorch file (text)": b"version https://git-lfs.github.com/spec/v1",
        "holds more than tensors (old)": pickle.dumps({"a": Path("/")}, protocol=2),
    }.items():
        found[name] = root / f"{len(found)}.pth"
        found[name].write_bytes(content)
    for name, value in {
        "holds more than tensors": {"weight": torch.ones(1), "where": Path("/")},
        "holds no table of weights (a tensor)": torch.ones(1),
        "holds no table of weights (numbers)": {"step": 3},
    }.items():
        found[name] = root / f"{len(found)}.pth"
        torch.save(value, found[name])
    found["is not a .safetensors"] = root / "weights.ckpt.zip"
    found["is not a .safetensors"].write_bytes(b"")
    found["has no config.json"] = root / "empty"
    found["has no config.json"].mkdir()
    return found


# -- the VAE --------------------------------------------------------------------------------------


def tiny_wan_vae(base_dim: int = 8, **changes: Any) -> AutoencoderKLWan:
    """Wan's VAE, whole but narrow: 8 channels at first instead of 96."""
    torch.manual_seed(0)
    return shuffled(AutoencoderKLWan(base_dim=base_dim, **changes), 0.02)


_RESIDUAL = {
    "norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}  # fmt: skip
_OUTER = {
    "quant_conv": "conv1", "post_quant_conv": "conv2", "encoder.conv_in": "encoder.conv1",
    "decoder.conv_in": "decoder.conv1", "encoder.norm_out": "encoder.head.0",
    "decoder.norm_out": "decoder.head.0", "encoder.conv_out": "encoder.head.2",
    "decoder.conv_out": "decoder.head.2",
}  # fmt: skip
_UP_STAGE = 4  # three residual blocks, and what doubles the picture


def original_vae(state: State) -> State:
    """Name the weights of a VAE as Wan2.1_VAE.pth does."""
    found = {}
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        if match := re.fullmatch(r"(\w+)\.mid_block\.(resnets|attentions)\.(\d)\.(\w+)", module):
            half, sort, number, part = match.groups()
            if sort == "attentions":
                module = f"{half}.middle.1.{part}"
            else:
                module = f"{half}.middle.{2 * int(number)}.{_RESIDUAL[part]}"
        elif match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(.+)", module):
            number, part = match.groups()
            module = f"encoder.downsamples.{number}.{_RESIDUAL.get(part, part)}"
        elif match := re.fullmatch(r"decoder\.up_blocks\.(\d)\.resnets\.(\d)\.(\w+)", module):
            stage, number, part = match.groups()
            number = _UP_STAGE * int(stage) + int(number)
            module = f"decoder.upsamples.{number}.{_RESIDUAL[part]}"
        elif match := re.fullmatch(r"decoder\.up_blocks\.(\d)\.upsamplers\.0\.(.+)", module):
            stage, part = match.groups()
            module = f"decoder.upsamples.{_UP_STAGE * int(stage) + 3}.{part}"
        else:
            module = _OUTER[module]
        found[f"{module}.{kind}"] = value
    assert len(found) == len(state)
    return found


def write_wan_vae(root: Path, base_dim: int = 8) -> dict[str, Path]:
    """Write one VAE as a folder and as both original files; their paths by kind."""
    vae = tiny_wan_vae(base_dim)
    vae.save_pretrained(root / "vae")
    files = save_original(original_vae(vae.state_dict()), root / "Wan2.1_VAE")
    return {"folder": root / "vae", **files}


# -- umT5 -----------------------------------------------------------------------------------------

_UMT5 = {
    "layer.0.layer_norm": "norm1", "layer.1.layer_norm": "norm2",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention": "attn", "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1", "layer.1.DenseReluDense.wo": "ffn.fc2",
    "shared": "token_embedding", "encoder.final_layer_norm": "norm", "encoder.block": "blocks",
}  # fmt: skip


def tiny_umt5(words: int) -> UMT5EncoderModel:
    """A umT5 of 3 layers and 4 heads, whose heads together are wider than the rest."""
    torch.manual_seed(0)
    settings = UMT5Config(
        vocab_size=words, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=4,
        relative_attention_num_buckets=16,
    )  # fmt: skip
    return shuffled(UMT5EncoderModel(settings))


def original_umt5(state: State) -> State:
    """Name the weights of umT5 as models_t5_umt5-xxl-enc-bf16.pth does."""
    found = {}
    for name, value in state.items():
        if name == "encoder.embed_tokens.weight":  # the same as `shared`
            continue
        for new, old in _UMT5.items():
            name = name.replace(new, old)
        found[name] = value
    return found


def write_umt5(root: Path) -> dict[str, Path]:
    """Write one umT5 as a folder and as both original files, with its tokenizer.

    Returns:
        Their paths by kind; the tokenizer's folder, too.
    """
    tokenizer = t5_tokenizer(CAPTIONS)
    tokenizer.save_pretrained(root / "tokenizer")
    model = tiny_umt5(len(tokenizer))
    model.save_pretrained(root / "text_encoder")
    files = save_original(original_umt5(model.state_dict()), root / "models_t5_umt5-xxl-enc-bf16")
    return {"folder": root / "text_encoder", "tokenizer": root / "tokenizer", **files}


# -- CLIP -----------------------------------------------------------------------------------------

_CLIP = {
    "embeddings.class_embedding": "cls_embedding", "pre_layrnorm": "pre_norm",
    "embeddings.position_embedding.weight": "pos_embedding", "post_layernorm": "post_norm",
    "embeddings.patch_embedding": "patch_embedding", "encoder.layers": "transformer",
    "self_attn.out_proj": "attn.proj", "layer_norm": "norm", "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}  # fmt: skip


def tiny_clip_vision() -> CLIPVisionModel:
    """A CLIP image encoder of 3 layers, with heads of the size of ViT-huge's."""
    torch.manual_seed(0)
    settings = CLIPVisionConfig(
        hidden_size=160, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        image_size=28, patch_size=14, hidden_act="gelu",
    )  # fmt: skip
    return shuffled(CLIPVisionModel(settings), 0.05)


def original_clip(state: State) -> State:
    """Name the weights of the image encoder as Wan's whole CLIP does, beside a text half."""
    found = {"log_scale": torch.zeros(()), "textual.token_embedding.weight": torch.ones(4, 2)}
    for name, value in state.items():
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(\w+)", name):
            layer, kind = match.groups()
            parts = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            found[f"visual.transformer.{layer}.attn.to_qkv.{kind}"] = torch.cat(parts)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            if name.endswith("class_embedding"):
                value = value[None, None]
            elif "position_embedding" in name:
                value = value[None]
            for new, old in _CLIP.items():
                name = name.replace(new, old)
            found[f"visual.{name}"] = value
    found["visual.head"] = torch.ones(found["visual.cls_embedding"].shape[-1], 12)
    return found


def write_clip_vision(root: Path) -> dict[str, Path]:
    """Write one CLIP image encoder as a folder and as both original files; their paths by kind."""
    model = tiny_clip_vision()
    model.save_pretrained(root / "image_encoder")
    files = save_original(original_clip(model.state_dict()), root / "models_clip_open-clip")
    return {"folder": root / "image_encoder", **files}
