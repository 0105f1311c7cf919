"""Sample clips of a training as MP4 files, and one picture of them; its curves.

`python -m latentmake.training.wan.decode ORDER` draws what the training has not, decodes all, and
draws its scalars. It is a process of its own, so that the training never has the VAE in memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from latentmake.caches.encoders.device import pick_device
from latentmake.caches.encoders.wan_vae import WanVae, load_wan_vae
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.files.mp4 import write_mp4
from latentmake.progress import Progress
from latentmake.training.command import exit_status
from latentmake.training.loop import drawing
from latentmake.training.loop.events import write_events
from latentmake.training.loop.grid import draw_grid, png_of
from latentmake.training.loop.result import RunFiles
from latentmake.training.loop.sample_rows import Drawn
from latentmake.training.order import read_order
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.recipe import WanRecipe
from latentmake.training.wan.sampling import decode_clip

Frames = list[NDArray[np.uint8]]

_STRIP = 768  # pixels; strips of larger frames are scaled down


def write_samples(order: WanOrder) -> None:
    """Draw and decode the sample clips of a finished training; see `drawing.write_samples`."""
    drawing.write_samples(WanRecipe(order), lambda rows: _shown(order, rows))


def _shown(order: WanOrder, rows: Mapping[int, Drawn]) -> dict[int, list[bytes | None]]:
    """Return the MP4s of each step; write their frames as a grid and as TensorBoard's events."""
    files, keys = RunFiles(order), order.picture_keys()
    clips: dict[int, list[bytes | None]] = {}
    strips: dict[int, list[Image.Image | None]] = {}
    if rows:
        vae = load_wan_vae(order.vae, pick_device(), torch.float32, decoder=True)
        for step, drawn in rows.items():
            frames = [_decoded(order, vae, drawn[key]) if key in drawn else None for key in keys]
            fps = order.trainer.samples.fps
            clips[step] = [None if each is None else _mp4(each, fps) for each in frames]
            strips[step] = [None if each is None else _strip(each) for each in frames]
        grid = draw_grid(list(strips.items()), [prompt.prompt for prompt in order.prompts])
        atomic.write(files.grid, png_of(grid))
    write_events(files.scalars / files.samples.name, strips)
    return clips


def _decoded(order: WanOrder, vae: WanVae, latents: torch.Tensor) -> Frames:
    frames = decode_clip(vae, latents, lambda line: Progress.write(line, file=sys.stderr))
    if frames is None:
        raise TrainingError(
            "memory does not suffice to decode a sample clip, even in tiles",
            where=f"run {order.run}",
            hint="end other programs, or lower samples.frames or samples.resolution",
        )
    return list(frames)


def _mp4(frames: Frames, fps: float) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "clip.mp4")
        write_mp4(file, frames, fps)
        return file.read_bytes()


def _strip(frames: Frames) -> Image.Image:
    """Return the first, middle and last frame of a clip side by side."""
    picked = [frames[place] for place in sorted({0, len(frames) // 2, len(frames) - 1})]
    strip = Image.fromarray(np.concatenate(picked, axis=1))
    strip.thumbnail((_STRIP, _STRIP))
    return strip


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.wan.decode ORDER`; return the exit status."""
    return exit_status(lambda: write_samples(read_order(Path(arguments[0]), WanOrder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
