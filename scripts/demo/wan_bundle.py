"""A tiny Wan 2.1, built offline.

The folder has the layout of diffusers' text-to-video pipeline: `vae`, `text_encoder`, `tokenizer`,
`transformer` and `scheduler` under a `model_index.json`. All weights are fp32 safetensors.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from latentmake.errors import UserError
from torch import Tensor
from transformers import T5Tokenizer, UMT5EncoderModel

from demo.folder import bundle_folder, own_torch_state
from demo.motion import Clip, draw_motion
from demo.text import HIDDEN_SIZE, t5_tokenizer, umt5_encoder
from demo.wan_autoencoder import encode_clips, make_wan_autoencoder, train_wan_autoencoder
from demo.wan_denoiser import make_wan_denoiser, make_wan_scheduler, train_wan_denoiser

__all__ = ["build_tiny_wan"]

_SCENES = 240
_SIZE = (96, 64)
_FRAMES = 9


def build_tiny_wan(
    folder: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    vae_steps: int = 300,
    transformer_steps: int = 1000,
) -> None:
    """Train and write the bundle, in little more than a minute on two cores.

    Equal seeds and thread counts give equal bytes on one machine. The bundle appears under its
    name only when complete, and replaces an older one.

    Args:
        folder: of the bundle.
        seed: of weights, scenes and batches.
        threads: of torch; its own choice by default.
        vae_steps: optimizer steps of the VAE.
        transformer_steps: optimizer steps of the transformer.

    Raises:
        ModelError: the folder holds files but no bundle.
    """
    with bundle_folder(folder) as unfinished, own_torch_state(seed, threads):
        _write_bundle(unfinished, seed, vae_steps, transformer_steps)


def _write_bundle(folder: Path, seed: int, vae_steps: int, transformer_steps: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - drawing, not cryptography
    generator = torch.Generator().manual_seed(seed)
    # A step sees no more scenes than this: a short training needs few.
    count = min(_SCENES, 4 * max(4, vae_steps, transformer_steps))
    scenes = [draw_motion(dice, _SIZE, _FRAMES) for _ in range(count)]
    captions = [caption for _, caption in scenes]
    clips = torch.stack([_to_tensor(clip) for clip, _ in scenes])

    autoencoder = make_wan_autoencoder()
    train_wan_autoencoder(autoencoder, clips, vae_steps, generator)

    tokenizer = t5_tokenizer(captions)
    text_encoder = umt5_encoder(tokenizer)
    embeddings = _embed(text_encoder, tokenizer, [*captions, ""])
    denoiser = make_wan_denoiser(HIDDEN_SIZE)
    train_wan_denoiser(
        denoiser,
        encode_clips(autoencoder, clips),
        embeddings[:-1],
        embeddings[-1:],
        transformer_steps,
        generator,
    )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoder,
        transformer=denoiser,
        scheduler=make_wan_scheduler(),
    ).save_pretrained(folder, safe_serialization=True)


def _to_tensor(clip: Clip) -> Tensor:
    """Return a clip as [3, frames, height, width] in -1 to 1."""
    return torch.from_numpy(clip.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2).contiguous()


def _embed(encoder: UMT5EncoderModel, tokenizer: T5Tokenizer, captions: list[str]) -> Tensor:
    """Return the last hidden states [count, tokens, `HIDDEN_SIZE`] of captions.

    Behind each are zeros, at least one row of them.
    """
    with torch.no_grad():
        states = [
            encoder(input_ids=tokenizer(caption, return_tensors="pt").input_ids).last_hidden_state
            for caption in captions
        ]
    found = torch.zeros(len(captions), 1 + max(each.shape[1] for each in states), HIDDEN_SIZE)
    for row, each in zip(found, states, strict=True):
        row[: each.shape[1]] = each[0]
    return found


def main() -> None:
    """Build the bundle in the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Build a tiny Wan 2.1, offline.")
    parser.add_argument("folder", type=Path, help="where the bundle goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    arguments = parser.parse_args()
    try:
        build_tiny_wan(arguments.folder, seed=arguments.seed, threads=arguments.threads)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
