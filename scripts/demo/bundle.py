"""A tiny Stable Diffusion, built offline.

The folder has the layout of diffusers: `vae`, `text_encoder`,
`tokenizer`, `unet` and `scheduler` under a `model_index.json`. A T5 encoder with its
tokenizer lies beside them. All weights are fp32 safetensors.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from latentmake.errors import UserError
from PIL import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from demo.autoencoder import encode, make_autoencoder, train_autoencoder
from demo.denoiser import make_denoiser, make_scheduler, train_denoiser
from demo.draw import draw_scene
from demo.folder import bundle_folder, own_torch_state
from demo.text import (
    clip_encoder,
    clip_tokenizer,
    save_slow_files,
    t5_encoder,
    t5_tokenizer,
    train_clip,
)

__all__ = ["build_tiny_bundle"]

_SCENES = 3000
_SCENES_PER_STEP = 16  # a batch sees no more, so a short training needs no more
_SIDE = 64


def build_tiny_bundle(
    folder: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    vae_steps: int = 320,
    text_steps: int = 800,
    unet_steps: int = 1400,
) -> None:
    """Train and write the bundle, in about two minutes of one core.

    Equal seeds and thread counts give equal bytes on one machine. The bundle appears under its
    name only when complete, and replaces an older one.

    Args:
        folder: of the bundle.
        seed: of weights, scenes and batches.
        threads: of torch; its own choice by default.
        vae_steps: optimizer steps of the VAE.
        text_steps: optimizer steps of the CLIP text encoder.
        unet_steps: optimizer steps of the UNet.

    Raises:
        ModelError: the folder holds files but no bundle.
    """
    with bundle_folder(folder) as unfinished, own_torch_state(seed, threads):
        _write_bundle(unfinished, seed, vae_steps, text_steps, unet_steps)


def _write_bundle(
    folder: Path, seed: int, vae_steps: int, text_steps: int, unet_steps: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - drawing, not cryptography
    generator = torch.Generator().manual_seed(seed)
    count = min(_SCENES, _SCENES_PER_STEP * max(4, vae_steps, unet_steps))
    scenes = [draw_scene(dice, (_SIDE, _SIDE)) for _ in range(count)]
    captions = [caption for _, caption in scenes]
    pictures = torch.stack([_to_tensor(image) for image, _ in scenes])

    autoencoder = make_autoencoder()
    train_autoencoder(autoencoder, pictures, vae_steps, generator)

    tokenizer = clip_tokenizer(captions)
    tokens, empty = _tokens(tokenizer, captions), _tokens(tokenizer, [""])
    text_encoder = clip_encoder(tokenizer)
    train_clip(text_encoder, tokens, pictures, text_steps, generator)

    latents = encode(autoencoder, pictures)
    denoiser = make_denoiser(latents.shape[1], text_encoder.config.hidden_size)
    train_denoiser(
        denoiser,
        latents,
        _embed(text_encoder, tokens),
        _embed(text_encoder, empty),
        unet_steps,
        generator,
    )

    pipeline = StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    save_slow_files(tokenizer, folder / "tokenizer")

    second_tokenizer = t5_tokenizer(captions)
    second_tokenizer.save_pretrained(folder / "tokenizer_2")
    t5_encoder(second_tokenizer).save_pretrained(folder / "text_encoder_2")


def _to_tensor(image: Image.Image) -> Tensor:
    """Return a picture as [3, height, width] in -1 to 1."""
    values = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1)
    return values.permute(2, 0, 1).contiguous()


def _tokens(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return the tokens [count, 77] of captions."""
    found: Tensor = tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    return found


def _embed(encoder: CLIPTextModel, tokens: Tensor) -> Tensor:
    """Return the last hidden states [count, 77, width] of captions' tokens."""
    with torch.no_grad():
        return torch.cat(
            [encoder(input_ids=part).last_hidden_state for part in torch.split(tokens, 100)]
        )


def main() -> None:
    """Build the bundle in the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Build a tiny Stable Diffusion, offline.")
    parser.add_argument("folder", type=Path, help="where the bundle goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    arguments = parser.parse_args()
    try:
        build_tiny_bundle(arguments.folder, seed=arguments.seed, threads=arguments.threads)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
