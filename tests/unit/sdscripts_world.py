"""A second reading of what sd-scripts demands of cache files, and tiny encoders to make some.

`latents_fault` and `text_fault` say what its strategies would find wrong with a file; they know
nothing of how this project writes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

SUFFIX = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux"}
MULTIPLE = {"sd3", "flux"}
TEXT_KEYS = {
    "sdxl": {"hidden_state1", "hidden_state2", "pool2"},
    "sd3": {
        *("lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask"),
        *("t5_attn_mask", "apply_lg_attn_mask", "apply_t5_attn_mask"),
    },
    "flux": {"l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask"},
}


def tiny_vae(channels: int = 4) -> AutoencoderKL:
    """A VAE of some thousand random weights, which makes an eighth of each side."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
    ).eval()


def read(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def latents_fault(
    path: Path,
    architecture: str,
    bucket: tuple[int, int],
    image: tuple[int, int],
    *,
    flip_aug: bool = False,
    alpha_mask: bool = False,
) -> str | None:
    """Say what is wrong with a file of latents; None where sd-scripts would train on it.

    Args:
        path: of the file.
        architecture: of the model.
        bucket: width and height of what was encoded, in pixels.
        image: those of the image.
        flip_aug: whether mirrored latents are asked for.
        alpha_mask: whether a mask is.
    """
    width, height = bucket[0] // 8, bucket[1] // 8
    ending = f"_{height}x{width}" if architecture in MULTIPLE else ""
    found = read(path)
    if not path.name.endswith(f"_{image[0]:04d}x{image[1]:04d}_{SUFFIX[architecture]}.npz"):
        return "it has another name"
    wanted = {"latents", "original_size", "crop_ltrb"}
    wanted |= {"latents_flipped"} if flip_aug else set()
    wanted |= {"alpha_mask"} if alpha_mask else set()
    if set(found) != {name + ending for name in wanted}:
        return f"it has the keys {sorted(found)}"
    found = {name.removesuffix(ending): array for name, array in found.items()}
    for name in wanted & {"latents", "latents_flipped"}:
        array = found[name]
        if array.dtype != np.float32 or array.shape[1:] != (height, width) or array.ndim != 3:
            return f"{name} is {array.dtype} {array.shape}"
    if found["original_size"].tolist() != list(image):
        return f"original_size is {found['original_size']}"
    if found["crop_ltrb"].dtype != np.float64 or found["crop_ltrb"].shape != (4,):
        return f"crop_ltrb is {found['crop_ltrb']}"
    if alpha_mask:
        mask = found["alpha_mask"]
        if mask.dtype != np.float32 or mask.shape != (bucket[1], bucket[0]):
            return f"alpha_mask is {mask.dtype} {mask.shape}"
        if mask.min() < 0 or mask.max() > 1:
            return "alpha_mask goes beyond 0 to 1"
    return None


def text_fault(
    path: Path, architecture: str, *, lg_mask: bool = False, t5_mask: bool = False
) -> str | None:
    """Say what is wrong with a file of text; None where sd-scripts would train on it."""
    found = read(path)
    if set(found) != TEXT_KEYS[architecture]:
        return f"it has the keys {sorted(found)}"
    for name, applied in (("apply_lg_attn_mask", lg_mask), ("apply_t5_attn_mask", t5_mask)):
        if name in found and (found[name].shape != () or found[name] != applied):
            return f"{name} is {found[name]}"
    shapes = {name: array.shape for name, array in found.items()}
    for name, array in found.items():
        if name.endswith("_attn_mask") and not name.startswith("apply"):
            of = "t5_out" if name.startswith("t5") else "lg_out"
            if array.dtype != np.int64 or array.shape != shapes[of][:1]:
                return f"{name} is {array.dtype} {array.shape}"
        elif not name.startswith("apply") and array.dtype not in (np.float32, np.float16):
            return f"{name} is {array.dtype}"
    if architecture == "flux" and (shapes["txt_ids"] != (shapes["t5_out"][0], 3)):
        return f"txt_ids is {shapes['txt_ids']}"
    if architecture == "sdxl" and shapes["hidden_state1"][0] != shapes["hidden_state2"][0]:
        return f"the states have {shapes['hidden_state1'][0]} and {shapes['hidden_state2'][0]} rows"
    return None
