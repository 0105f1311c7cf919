"""Sample pictures of a training: drawn, decoded and written after some steps, also for TensorBoard.

The index names the pictures of one training only. Pictures are drawn only during a training. For a
new prompt, the next training draws them, or `generate_{run}` does.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from latentmake.base import atomic
from latentmake.base.errors import StorageError, shortened
from latentmake.base.progress import say
from latentmake.formats.media import drawn_picture
from latentmake.formats.video import spread_frames
from latentmake.pages.curves import curves_png, draw_grid
from latentmake.plan.product import Parts
from latentmake.runs.order import RunFiles
from latentmake.runs.results import INDEX, PictureIndex
from latentmake.trainers.loop.order import TrainingOrder
from latentmake.trainers.loop.recipe import Painter

# Files that Latentmake may remove: pictures, and latents that earlier releases wrote.
_OURS = re.compile(r"\.?step-\d{6,}(_\d{2,}\.(png|mp4)|\.safetensors)")
_PAUSE = 60.0  # fewest seconds between two grids, for trainings that draw often
_STRIP = 768  # pixels; larger strips of frames are scaled down


class Samples:
    """Sample pictures in the folder of a training.

    Args:
        order: order of the training.
        want: parts of the training.
        kept: parts of trainings whose pictures stay; all other pictures are removed.

    Attributes:
        rows: step -> name of the picture of each prompt; None for a picture that was left out.
    """

    def __init__(self, order: TrainingOrder, want: Parts, kept: Collection[Parts] = ()) -> None:
        self._order, self._wanted = order, want
        self._files = RunFiles(order)
        self._shown = -_PAUSE
        self._events: Any = None
        self.rows: dict[int, list[str | None]] = {}
        folder, index = self._files.samples, PictureIndex.read(self._files.samples / INDEX)
        if index is None or index.parts not in kept:
            for path in (self._files.grid, self._files.curves):
                path.unlink(missing_ok=True)
        elif index.shown == picture_index(order, want, {}).shown:
            self.rows = {
                step: row
                for step, row in zip(index.steps, index.files, strict=True)
                if all(name is None or (folder / name).is_file() for name in row)
            }
        named = {name for row in self.rows.values() for name in row}
        for path in folder.glob("*step-*"):
            if _OURS.fullmatch(path.name) and path.name not in named:
                path.unlink()
        shutil.rmtree(self._files.logs / folder.name, ignore_errors=True)
        self._log(self.rows)
        self._write_index()

    def draw(self, step: int, draw: Callable[[], Iterable[torch.Tensor]], painter: Painter) -> None:
        """Draw and write the pictures of a step, unless they exist.

        `draw` returns the unscaled latents of each prompt's picture. Afterwards the painter drops
        the VAE, which frees its memory.
        """
        if step in self.rows:
            return
        row: list[str | None] = []
        for number, latents in enumerate(draw()):
            name = f"step-{step:06d}_{number:02d}{painter.settings.suffix}"
            fault = ""
            try:
                if painter.write(self._files.samples / name, latents) is None:
                    fault = "memory does not suffice to decode it"
            except FloatingPointError as error:
                fault = f"it is NaN or infinite; {error}"
            if fault:
                prompt = shortened(self._order.prompts[number].prompt)
                say(f"warning: the sample of `{prompt}` at step {step} is left out: {fault}")
            row.append(None if fault else name)
        painter.vae = None
        self.rows[step] = row
        self._log([step])
        if time.monotonic() > self._shown + _PAUSE:
            self.show()
        self._write_index()

    def show(self) -> None:
        """Write the grid of pictures, and the curves."""
        rows = [
            (f"step {step}", [self._picture(name) for name in row])
            for step, row in sorted(self.rows.items())
        ]
        if rows := [(label, row) for label, row in rows if any(row)]:
            grid = draw_grid(rows, [prompt.prompt for prompt in self._order.prompts])
            with atomic.replacing(self._files.grid) as temporary:
                grid.save(temporary, "PNG")
        if curves := curves_png(self._files.logs, title=self._order.run):
            atomic.write(self._files.curves, curves)
        self._shown = time.monotonic()

    def _picture(self, name: str | None) -> Image.Image | None:
        """Return a picture; for a clip, its first, middle and last frame side by side.

        It is None if it was left out, or if somebody has removed or damaged it meanwhile.
        """
        if name is None or not name.endswith(".mp4"):
            return None if name is None else drawn_picture(self._files.samples / name)
        with suppress(StorageError):
            frames = spread_frames(self._files.samples / name, 3)
            strip = Image.fromarray(np.concatenate(frames, axis=1))
            strip.thumbnail((_STRIP, _STRIP))
            return strip
        return None

    def _write_index(self) -> None:
        index = picture_index(self._order, self._wanted, self.rows)
        index.write(self._files.samples / INDEX)

    def _log(self, steps: Iterable[int]) -> None:
        """Write pictures for TensorBoard; the tags `samples/00` and so on stand for the prompts."""
        for step in steps:
            for number, name in enumerate(self.rows[step]):
                if self._events is None:
                    self._events = SummaryWriter(str(self._files.logs / self._files.samples.name))
                if (picture := self._picture(name)) is not None:
                    tag = f"samples/{number:02d}"
                    self._events.add_image(tag, np.asarray(picture), step, dataformats="HWC")
        if self._events is not None:
            self._events.flush()


def picture_index(
    order: TrainingOrder, want: Parts, rows: Mapping[int, Sequence[str | None]]
) -> PictureIndex:
    """Return the index of a training's pictures; `rows` is step -> names of the pictures."""
    return PictureIndex(
        run=order.run,
        parts=want,
        prompts=[prompt.prompt for prompt in order.prompts] if rows else [],
        seed=order.trainer.samples.seed,
        steps=sorted(rows),
        files=[list(rows[step]) for step in sorted(rows)],
        settings={
            **order.described(),
            "weights": want["network"],
            "data": want["dataset"],
            "trainer": order.trainer.model_dump(mode="json"),
            "sample_size": [*order.sample_size],
        },
    )
