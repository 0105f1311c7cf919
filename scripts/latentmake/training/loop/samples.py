"""Sample pictures of a training, at their step: drawn, decoded, written, shown by TensorBoard.

The index names the pictures of one training alone. A new prompt or setting of the pictures needs no
step of training: `draw_later` draws from the network as it began, from the copies along the way and
from the trained weights. Steps whose weights are gone keep the pictures that they have.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from latentmake.caches.encoders.device import within_memory
from latentmake.files import atomic
from latentmake.progress import Progress
from latentmake.training.loop.accelerator import DTYPES, make_accelerator
from latentmake.training.loop.curves import draw_curves
from latentmake.training.loop.data.caches import Caches, read_items
from latentmake.training.loop.grid import draw_grid, png_of
from latentmake.training.loop.recipe import Drawn, Recipe
from latentmake.training.loop.result import COPIED, Record, RunFiles, sample_steps, wanted
from latentmake.training.loop.sample_images import (
    CURVES,
    INDEX,
    PictureIndex,
    picture_name,
    read_index,
)
from latentmake.training.order import Wanted

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
        rows: step -> name of the picture of each prompt, or None.
    """

    def __init__(
        self, recipe: Recipe, want: Wanted, ends: Iterable[int], kept: Collection[Wanted] = ()
    ) -> None:
        order = recipe.order
        self._recipe, self._order, self._wanted = recipe, order, want
        self._files, self._keys = RunFiles(order), order.picture_keys()
        self._shown = -_PAUSE
        self._events: Any = None
        names: dict[str, str] = {}
        self.steps = frozenset[int]().union(*(sample_steps(order, end) for end in ends))
        self.rows: dict[int, list[str | None]] = {}
        index = read_index(self._files.samples)
        if index is None or index.wanted not in kept:
            for path in (self._files.grid, self._files.output / CURVES):
                path.unlink(missing_ok=True)
        else:
            same = index.pictures == order.pictures_digest()
            known = index.keys or (self._keys if same else [])
            for step, row in zip(index.steps, index.files, strict=True):
                there = dict(zip(known, row, strict=False))
                for number, name in enumerate(map(there.get, self._keys)):
                    if name and step in self.steps and (self._files.samples / name).is_file():
                        names[name] = picture_name(step, number, order.picture_suffix)
                        self._put(step, number, names[name])
        self._keep(names)
        shutil.rmtree(self._files.scalars / self._files.samples.name, ignore_errors=True)
        self._log(self.rows)
        self._write_index(complete=False)

    def _keep(self, names: Mapping[str, str]) -> None:
        """Give pictures their new names, and remove the index and all others."""
        folder = self._files.samples
        (folder / INDEX).unlink(missing_ok=True)
        for name in names:
            (folder / name).rename(folder / f".{name}")
        for path in folder.glob("*step-*"):
            if _OURS.fullmatch(path.name) and path.name[1:] not in names:
                path.unlink()
        for name, new in names.items():
            (folder / f".{name}").rename(folder / new)

    def _put(self, step: int, number: int, name: str) -> None:
        self.rows.setdefault(step, [None] * len(self._keys))[number] = name

    def missing(self, step: int) -> list[str]:
        """Return the keys of the pictures of a step that are not there."""
        row = self.rows.get(step, [None] * len(self._keys))
        return [key for key, name in zip(self._keys, row, strict=True) if name is None]

    def draw(
        self, step: int, draw: Callable[[Collection[str]], Drawn], device: torch.device
    ) -> int:
        """Draw and write the pictures of a step that are missing; return how many.

        Args:
            step: of the training.
            draw: returns the latents of some pictures, named by their keys.
            device: that decodes them; the VAE is loaded for it and forgotten.
        """
        drawn = draw(missing) if (missing := self.missing(step)) else {}
        new: list[str | None] = [None] * len(self._keys)
        decode = within_memory(self._recipe.make_decoder, device) if drawn else None
        for key, latents in drawn.items():
            number = self._keys.index(key)
            name = picture_name(step, number, self._order.picture_suffix)
            data = None if decode is None else decode(latents)
            if data is None:
                say(f"memory does not suffice to decode {name}: it is left out")
                continue
            atomic.write(self._files.samples / name, data)
            self._put(step, number, name)
            new[number] = name
        self._log({step: new})
        if time.monotonic() > self._shown + _PAUSE:
            self._show()
        self._write_index(complete=False)
        return len(drawn)

    def finish(self) -> None:
        """Write grid, curves and index after the last step."""
        self._show()
        self._write_index(complete=True)

    def _show(self) -> None:
        if self.rows:
            pictures = {step: self._pictures(row) for step, row in sorted(self.rows.items())}
            grid = draw_grid(list(pictures.items()), [each.prompt for each in self._order.prompts])
            atomic.write(self._files.grid, png_of(grid))
        curves = self._files.output / CURVES
        draw_curves(self._files.scalars, curves, title=self._order.run)
        self._shown = time.monotonic()

    def _write_index(self, *, complete: bool) -> None:
        curves = (self._files.output / CURVES).is_file()
        index = PictureIndex.of(self._order, self._wanted, self.rows, curves=curves)
        if not complete:
            index = index.model_copy(update={"pictures": ""})
        index.write(self._files.samples / INDEX)

    def _pictures(self, row: Iterable[str | None]) -> list[Image.Image | None]:
        return [None if name is None else picture_of(self._files.samples / name) for name in row]

    def _log(self, rows: Mapping[int, Sequence[str | None]]) -> None:
        """Write pictures for TensorBoard, tagged `samples/00` and so on by their prompts."""
        if not any(name for row in rows.values() for name in row):
            return
        if self._events is None:
            self._events = SummaryWriter(str(self._files.scalars / self._files.samples.name))
        for step, row in rows.items():
            for number, picture in enumerate(self._pictures(row)):
                if picture is not None:
                    tag, pixels = f"samples/{number:02d}", np.asarray(picture)
                    self._events.add_image(tag, pixels, step, dataformats="HWC")
        self._events.flush()


def say(text: str) -> None:
    """Say a line to the user, above the progress bar."""
    Progress.write(text, file=sys.stderr)


def picture_of(file: Path) -> Image.Image:
    """Return a picture, or the first, middle and last frame of a clip side by side."""
    if file.suffix != ".mp4":
        with Image.open(file, formats=["PNG"]) as picture:
            return picture.convert("RGB")
    import av

    with av.open(str(file)) as clip:
        frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    picked = [frames[place] for place in sorted({0, len(frames) // 2, len(frames) - 1})]
    strip = Image.fromarray(np.concatenate(picked, axis=1))
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
    weights: dict[int, Path | None] = {record.steps: files.output}
    weights |= {} if settings.resume_from_checkpoint else {0: None}
    for folder in files.saved.glob("step-*"):
        if Wanted.read(folder / COPIED) == want:
            weights.setdefault(int(folder.name.removeprefix("step-")), folder)
    steps = [step for step in sorted(samples.steps & weights.keys()) if samples.missing(step)]
    if steps:
        caches = Caches(read_items(Path(order.manifest))[:1], recipe.tensors)
        sampler = recipe.make_sampler(recipe.make_objective(), caches.examples[0].latents)
        accelerator = make_accelerator(settings, order.kind)
        device, dtype = accelerator.device, DTYPES[settings.mixed_precision]
        network = recipe.make_network(
            channels=caches.channels, text_width=caches.text_width, dtype=dtype
        )
        network.to(device).eval()

        def draw(keys: Collection[str]) -> Drawn:
            with torch.no_grad(), accelerator.autocast():
                return sampler.draw(network, keys, device=device, dtype=dtype)

    for step in steps:  # ascending: the network is as it began for step 0
        if (source := weights[step]) is not None:
            recipe.read_copy(network, source)
        count = samples.draw(step, draw, device)
        pictures = "picture" if count == 1 else "pictures"
        say(f"{order.run}: {count} sample {pictures} of step {step} drawn")
    samples.finish()
