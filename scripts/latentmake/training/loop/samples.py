"""Sample pictures of a training, at their step: drawn, decoded, written, shown by TensorBoard.

The index names the pictures of one training alone. A new prompt or setting of the pictures needs no
step of training: `draw_later` draws from the network as it began, from the copies along the way and
from the trained weights. Steps whose weights are gone keep the pictures that they have.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from latentmake.caches.encoders.device import within_memory
from latentmake.files import atomic
from latentmake.files.video import spread_frames
from latentmake.progress import say
from latentmake.training.loop.caches import Caches, read_items
from latentmake.training.loop.order import (
    CURVES,
    INDEX,
    PictureIndex,
    picture_name,
    read_index,
    sample_steps,
    wanted,
)
from latentmake.training.loop.pictures import curves_png, draw_grid, png_of
from latentmake.training.loop.recipe import DTYPES, Drawn, Recipe, make_accelerator
from latentmake.training.order import COPIED, Record, RunFiles, Wanted

# Ours: pictures, those that are being renamed, and the latents that earlier releases wrote.
_OURS = re.compile(r"\.?step-\d{6,}(_\d{2,}\.(png|mp4)|\.safetensors)")
_PAUSE = 60.0  # seconds between two grids of a training that draws often
_STRIP = 768  # pixels; strips of larger frames are scaled down


class Samples:
    """The sample pictures in the folder of a training.

    Args:
        recipe: draws and decodes.
        want: digests of the training.
        ends: its last step, and those of the shorter trainings that it goes on from.
        kept: digests of the trainings whose pictures stay; all others are removed.

    Attributes:
        steps: after which pictures are drawn.
        names: (step, key of a prompt's picture) -> name of the file.
    """

    def __init__(
        self, recipe: Recipe, want: Wanted, ends: Iterable[int], kept: Collection[Wanted] = ()
    ) -> None:
        order = recipe.order
        self._recipe, self._order, self._wanted = recipe, order, want
        self._files, self._keys = RunFiles(order), order.picture_keys()
        self._shown = -_PAUSE
        self._events: Any = None
        self.steps = frozenset[int]().union(*(sample_steps(order, end) for end in ends))
        self.names: dict[tuple[int, str], str] = {}
        renamed: dict[str, str] = {}
        index = read_index(self._files.samples)
        if index is None or index.wanted not in kept:
            for path in (self._files.grid, self._files.output / CURVES):
                path.unlink(missing_ok=True)
        else:
            same = index.pictures == order.pictures_digest()
            known = index.keys or (self._keys if same else [])
            for step, row in zip(index.steps, index.files, strict=True):
                for key, name in zip(known, row, strict=False):
                    asked = step in self.steps and key in self._keys
                    if name and asked and (self._files.samples / name).is_file():
                        renamed[name] = self.names[step, key] = self._name(step, key)
        self._keep(renamed)
        shutil.rmtree(self._files.logs / self._files.samples.name, ignore_errors=True)
        self._log(self.names)
        self._write_index(complete=False)

    def _name(self, step: int, key: str) -> str:
        return picture_name(step, self._keys.index(key), self._order.picture_suffix)

    def _keep(self, renamed: Mapping[str, str]) -> None:
        """Give pictures their new names, and remove the index and all others."""
        folder = self._files.samples
        (folder / INDEX).unlink(missing_ok=True)
        for name in renamed:
            (folder / name).rename(folder / f".{name}")
        for path in folder.glob("*step-*"):
            if _OURS.fullmatch(path.name) and path.name[1:] not in renamed:
                path.unlink()
        for name, new in renamed.items():
            (folder / f".{name}").rename(folder / new)

    def missing(self, step: int) -> list[str]:
        """Return the keys of the pictures of a step that are not there."""
        return [key for key in self._keys if (step, key) not in self.names]

    def draw(
        self, step: int, draw: Callable[[Collection[str]], Drawn], device: torch.device
    ) -> int:
        """Draw and write the pictures of a step that are missing; return how many.

        `draw` returns the latents of pictures, named by their keys; the VAE that decodes them is
        loaded on the device, and forgotten.
        """
        drawn = draw(missing) if (missing := self.missing(step)) else {}
        decode = within_memory(self._recipe.make_decoder, device) if drawn else None
        new: dict[tuple[int, str], str] = {}
        for key, latents in drawn.items():
            name = self._name(step, key)
            data = None if decode is None else decode(latents)
            if data is None:
                say(f"memory does not suffice to decode {name}: it is left out")
                continue
            atomic.write(self._files.samples / name, data)
            new[step, key] = name
        self.names |= new
        self._log(new)
        if time.monotonic() > self._shown + _PAUSE:
            self._show()
        self._write_index(complete=False)
        return len(drawn)

    def finish(self) -> None:
        """Write grid, curves and index after the last step."""
        self._show()
        self._write_index(complete=True)

    def _rows(self) -> dict[int, list[str | None]]:
        """Return the name of each prompt's picture by the step, or None."""
        steps = sorted({step for step, _ in self.names})
        return {step: [self.names.get((step, key)) for key in self._keys] for step in steps}

    def _show(self) -> None:
        folder = self._files.samples
        rows = [
            (f"step {step}", [None if name is None else picture_of(folder / name) for name in row])
            for step, row in self._rows().items()
        ]
        if rows:
            grid = draw_grid(rows, [each.prompt for each in self._order.prompts])
            atomic.write(self._files.grid, png_of(grid))
        if curves := curves_png(self._files.logs, title=self._order.run):
            atomic.write(self._files.output / CURVES, curves)
        self._shown = time.monotonic()

    def _write_index(self, *, complete: bool) -> None:
        curves = (self._files.output / CURVES).is_file()
        index = PictureIndex.of(self._order, self._wanted, self._rows(), curves=curves)
        index = index if complete else index.model_copy(update={"pictures": ""})
        index.write(self._files.samples / INDEX)

    def _log(self, names: Mapping[tuple[int, str], str]) -> None:
        """Write pictures for TensorBoard, tagged `samples/00` and so on by their prompts."""
        if not names:
            return
        if self._events is None:
            self._events = SummaryWriter(str(self._files.logs / self._files.samples.name))
        for (step, key), name in names.items():
            pixels = np.asarray(picture_of(self._files.samples / name))
            tag = f"samples/{self._keys.index(key):02d}"
            self._events.add_image(tag, pixels, step, dataformats="HWC")
        self._events.flush()


def picture_of(file: Path) -> Image.Image:
    """Return a picture, or the first, middle and last frame of a clip side by side."""
    if file.suffix != ".mp4":
        with Image.open(file, formats=["PNG"]) as picture:
            return picture.convert("RGB")
    strip = Image.fromarray(np.concatenate(spread_frames(file, 3), axis=1))
    strip.thumbnail((_STRIP, _STRIP))
    return strip


def draw_later(recipe: Recipe) -> None:
    """Draw the samples that a finished training lacks, from weights that are there; its curves.

    No step is trained, and no file of weights is written.
    """
    order, settings = recipe.order, recipe.order.trainer
    files, want = RunFiles(order), wanted(order)
    record = Record.read(files.record)
    assert record is not None
    # A longer training keeps the pictures of the one that it went on from.
    samples = Samples(recipe, want, (*record.continued, record.steps), [want])
    weights: dict[int, Path | None] = {0: None, record.steps: files.output}
    for folder in files.saved.glob("step-*"):
        if Wanted.read(folder / COPIED) == want:
            weights.setdefault(int(folder.name.removeprefix("step-")), folder)
    steps = [step for step in sorted(samples.steps & weights.keys()) if samples.missing(step)]
    if steps:
        caches = Caches(read_items(Path(order.manifest))[:1], recipe.tensors)
        sampler = recipe.make_sampler(recipe.make_objective(), caches.examples[0].latents)
        accelerator = make_accelerator(settings)
        device, dtype = accelerator.device, DTYPES[settings.mixed_precision]
        network = recipe.make_network(
            channels=caches.channels, text_width=caches.text_width, dtype=dtype
        )
        recipe.place(network.eval(), device)

        def draw(keys: Collection[str]) -> Drawn:
            with torch.no_grad(), accelerator.autocast():
                drawn: Drawn = sampler.draw(network, keys, device=device, dtype=dtype)
                return drawn

    for step in steps:  # ascending: the network is as it began for step 0
        if (source := weights[step]) is not None:
            recipe.read_copy(network, source)
        count = samples.draw(step, draw, device)
        pictures = "picture" if count == 1 else "pictures"
        say(f"{order.run}: {count} sample {pictures} of step {step} drawn")
    samples.finish()
