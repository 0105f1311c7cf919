"""Sample clips of a training as MP4 files, and one picture of them; its curves.

`python -m latentmake.training.wan.decode ORDER` draws what the training has not, decodes all, and
draws its scalars. It is a process of its own, so that the training never has the VAE in memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from latentmake.caches.encoders.device import compute_dtype, pick_device
from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.errors import UserError
from latentmake.files import atomic
from latentmake.files.mp4 import write_mp4
from latentmake.training.loop import drawing
from latentmake.training.loop.grid import draw_grid, png_of
from latentmake.training.loop.result import RunFiles
from latentmake.training.loop.sample_rows import Drawn
from latentmake.training.order import read_order
from latentmake.training.process import say_error
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.recipe import WanRecipe

__all__ = ["main", "write_samples"]


def write_samples(order: WanOrder) -> None:
    """Draw and decode the sample clips of a finished training; see `drawing.write_samples`."""
    drawing.write_samples(WanRecipe(order), lambda rows: _shown(order, rows))


def _shown(order: WanOrder, rows: Mapping[int, Drawn]) -> dict[int, list[bytes | None]]:
    """Return the MP4s of each step; write a grid of the frames in their middle."""
    keys, clips = order.picture_keys(), dict[int, list[bytes | None]]()
    if not rows:
        return clips
    device = pick_device()
    dtype = compute_dtype(device, "bfloat16", lambda line: None)
    vae = load_wan_vae(order.vae, device, dtype, decoder=True)
    frames: list[tuple[int, list[Image.Image | None]]] = []
    for step, drawn in rows.items():
        clips[step] = []
        frames.append((step, []))
        for key in keys:
            pixels = vae.decode(drawn[key]) if key in drawn else None
            middle = None if pixels is None else Image.fromarray(pixels[len(pixels) // 2])
            frames[-1][1].append(middle)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "clip.mp4")
                if pixels is not None:
                    write_mp4(file, pixels, order.trainer.samples.fps)
                clips[step].append(None if pixels is None else file.read_bytes())
    grid = draw_grid(frames, [prompt.prompt for prompt in order.prompts])
    atomic.write(RunFiles(order).grid, png_of(grid))
    return clips


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.wan.decode ORDER`; return the exit status."""
    try:
        write_samples(read_order(Path(arguments[0]), WanOrder))
    except UserError as error:
        say_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
