"""Sample pictures of a training, alone and in one grid, and its curves.

`python -m latentmake.training.sd.decode ORDER` draws what the training has not, decodes all, a row
for each step and a column for each prompt, and draws its scalars. It is a process of its own, so
that the training never has the VAE in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from latentmake.caches.encoders.device import pick_device
from latentmake.caches.encoders.vae import load_vae
from latentmake.files import atomic
from latentmake.training.command import exit_status
from latentmake.training.loop import drawing
from latentmake.training.loop.events import write_events
from latentmake.training.loop.grid import draw_grid, png_of
from latentmake.training.loop.result import RunFiles
from latentmake.training.loop.sample_rows import Drawn
from latentmake.training.order import read_order
from latentmake.training.sd.order import SdOrder
from latentmake.training.sd.recipe import SdRecipe

Pictures = Mapping[int, Sequence[Image.Image | None]]


@torch.no_grad()
def decode(vae: Any, latents: torch.Tensor) -> Image.Image:
    """Decode the unscaled latents [channels, height, width] of a picture."""
    first = next(vae.parameters())
    (pixels,) = vae.decode(latents[None].to(first.device, first.dtype), return_dict=False)
    values = ((pixels[0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())


def write_samples(order: SdOrder) -> None:
    """Draw and decode the sample pictures of a finished training; see `drawing.write_samples`."""
    drawing.write_samples(SdRecipe(order), lambda rows: _shown(order, rows))


def _shown(order: SdOrder, rows: Mapping[int, Drawn]) -> dict[int, list[bytes | None]]:
    """Return the PNGs of each step; write their grid, and TensorBoard's events."""
    files, keys = RunFiles(order), order.picture_keys()
    pictures: dict[int, list[Image.Image | None]] = {}
    if rows:
        vae = load_vae(order.vae, pick_device(), torch.float32)
        pictures = {
            step: [decode(vae, drawn[key]) if key in drawn else None for key in keys]
            for step, drawn in rows.items()
        }
        grid = draw_grid(list(pictures.items()), [prompt.prompt for prompt in order.prompts])
        atomic.write(files.grid, png_of(grid))
    write_events(files.scalars / files.samples.name, pictures)
    return {
        step: [None if picture is None else png_of(picture) for picture in row]
        for step, row in pictures.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.sd.decode ORDER`; return the exit status."""
    return exit_status(lambda: write_samples(read_order(Path(arguments[0]), SdOrder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
