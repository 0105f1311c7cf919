"""Tiny Wan DiTs with random weights, in every form that users have them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from latentmake.models.files import PARTS, folder_in
from safetensors.torch import save_file

State = dict[str, torch.Tensor]

HEADS = 2
_LAYERS = {
    "attn1.to_out.0": "self_attn.o", "attn2.to_out.0": "cross_attn.o", "attn1.to_": "self_attn.",
    "attn2.to_": "cross_attn.", "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img", "attn2.norm_added_k": "cross_attn.norm_k_img",
    "attn1.": "self_attn.", "attn2.": "cross_attn.", "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2", "norm2": "norm3", "scale_shift_table": "modulation",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
}  # fmt: skip
_IMAGE = {"norm1": "0", "ff.net.0.proj": "1", "ff.net.2": "3", "norm2": "4"}


def tiny_dit(*, heads: int = HEADS, head: int = 12, **changes: Any) -> WanTransformer3DModel:
    """A WanTransformer3DModel of two narrow blocks, with no weight at its start."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "in_channels": 16,
        "text_dim": 24,
        "freq_dim": 32,
        "ffn_dim": 40,
        "num_layers": 2,
    }
    dit = WanTransformer3DModel(**{**settings, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in dit.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return dit.eval()


def image_dit(*, heads: int = HEADS, head: int = 12, **changes: Any) -> WanTransformer3DModel:
    """The same for image-to-video of Wan 2.1, with the image encoder's output as a condition."""
    image = {"in_channels": 36, "image_dim": 20, "added_kv_proj_dim": heads * head}
    return tiny_dit(heads=heads, head=head, **image, **changes)


def original_dit(state: State, prefix: str = "") -> State:
    """Name the weights of a DiT as Wan's original release does."""
    found = {}
    for name, value in state.items():
        if match := re.fullmatch(r"condition_embedder\.image_embedder\.(.+)\.(\w+)", name):
            name = f"img_emb.proj.{_IMAGE[match[1]]}.{match[2]}"
        elif name == "scale_shift_table":
            name = "head.modulation"
        else:
            for new, old in _LAYERS.items():
                name = name.replace(new, old)
        found[f"{prefix}{name}"] = value
    assert len(found) == len(state)
    return found


def original_config(dit: WanTransformer3DModel) -> dict[str, Any]:
    """Return the config.json of the original release for a network."""
    config = dit.config
    return {
        "_class_name": "WanModel",
        "_diffusers_version": "0.30.0",
        "dim": config.num_attention_heads * config.attention_head_dim,
        "eps": 1e-06,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "model_type": "t2v",
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "out_dim": config.out_channels,
        "text_len": 512,
    }


def write_file(state: State, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return path


def write_shards(state: State, folder: Path, count: int = 3) -> None:
    """Write weights as shards with an index, as both releases do."""
    stem, total = "diffusion_pytorch_model", {}
    for number in range(count):
        part = dict(list(state.items())[number::count])
        name = f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"
        write_file(part, folder / name)
        total |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": total}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def forms(dit: WanTransformer3DModel, root: Path) -> dict[str, Path]:
    """Write a network in all forms; their paths by kind."""
    state = dit.state_dict()
    found = {name: root / name.replace(" ", "_") for name in ("folder", "sharded folder")}
    dit.save_pretrained(found["folder"])
    dit.save_pretrained(found["sharded folder"], max_shard_size="20KB")
    pipeline = root / "pipeline"
    dit.save_pretrained(pipeline / "transformer")
    (pipeline / "model_index.json").write_text("{}")
    release = root / "release"
    write_shards(original_dit(state), release)
    found |= {"pipeline": Path(folder_in(str(pipeline), PARTS["dit"])), "original folder": release}
    config = json.dumps(original_config(dit))
    (release / "config.json").write_text(config)
    for name, content in {
        "diffusers file": state,
        "original file": original_dit(state),
        "comfyui file": original_dit(state, "model.diffusion_model."),
        "prefixed file": original_dit(state, "diffusion_model."),
    }.items():
        found[name] = write_file(content, root / name.replace(" ", "_") / "dit.safetensors")
        (found[name].parent / "config.json").write_text(config)
    return found


def inputs(dit: WanTransformer3DModel, *, size: tuple[int, int, int] = (3, 4, 6)) -> State:
    """Draw what a network is called with: latents, timesteps, text."""
    generator = torch.Generator().manual_seed(2)
    config = dit.config
    found = {
        "hidden_states": torch.randn(2, config.in_channels, *size, generator=generator),
        "timestep": torch.tensor([900, 31]),
        "encoder_hidden_states": torch.randn(2, 7, config.text_dim, generator=generator),
    }
    if config.image_dim is not None:
        pictures = 1 if config.pos_embed_seq_len is None else 2  # of each clip
        shape = (2 * pictures, 5, config.image_dim)
        found["encoder_hidden_states_image"] = torch.randn(shape, generator=generator)
    return found
