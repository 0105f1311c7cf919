"""Sample pictures of a training, alone and in one grid, and its curves.

`python -m latentmake.training.sd.decode ORDER` draws what the training has not, decodes all, a row
for each step and a column for each prompt, and draws its scalars. It is a process of its own, so
that the training never has the VAE in memory.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.utils.tensorboard import SummaryWriter

from latentmake.caches.encoders.device import pick_device
from latentmake.caches.encoders.vae import load_vae
from latentmake.errors import UserError, storage_error
from latentmake.files import atomic
from latentmake.training.loop import drawing
from latentmake.training.loop.result import RunFiles
from latentmake.training.loop.sample_rows import Drawn
from latentmake.training.order import read_order
from latentmake.training.process import say_error
from latentmake.training.sd.order import SdOrder
from latentmake.training.sd.recipe import SdRecipe

__all__ = ["decode", "draw_grid", "main", "write_events", "write_samples"]

Pictures = Mapping[int, Sequence[Image.Image | None]]

_MARGIN = 8
_FONT_SIZE = 14
_CELL = 128  # pixels; smaller pictures are enlarged by a whole number
_HEADER_LINES = 4
_ABSENT = "#eeeeee"  # the place of a picture that cannot be drawn any more


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


def _wrap(text: str, width: float) -> list[str]:
    """Break a text into lines of at most `width` pixels; a text too long ends in an ellipsis."""
    font = _font()
    lines: list[str] = []
    line = ""
    for word in text.split():
        while word:
            longer = f"{line} {word}".strip()
            if font.getlength(longer) <= width:
                line, word = longer, ""
            elif line:
                lines.append(line)
                line = ""
            else:  # one word wider than the column
                fitting = sum(font.getlength(word[:end]) <= width for end in range(1, len(word)))
                cut = max(1, fitting)
                lines.append(word[:cut])
                word = word[cut:]
    lines.append(line)
    if len(lines) > _HEADER_LINES:
        last = lines[_HEADER_LINES - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: _HEADER_LINES - 1], last + "…"]
    return lines


def draw_grid(
    rows: Sequence[tuple[int, Sequence[Image.Image | None]]], prompts: Sequence[str]
) -> Image.Image:
    """Return one picture of all sample pictures.

    Args:
        rows: (step, a picture for each prompt), all of one size; None leaves its place grey.
        prompts: the columns' headers.
    """
    width, height = next(each.size for _, row in rows for each in row if each is not None)
    enlarged = max(1, -(-_CELL // max(width, height)))
    width, height = width * enlarged, height * enlarged
    headers = [_wrap(prompt, width) for prompt in prompts]
    line = _FONT_SIZE + 4
    top = _MARGIN + line * max(len(header) for header in headers) + _MARGIN
    labels = [f"step {step}" for step, _ in rows]
    left = 2 * _MARGIN + round(max(_font().getlength(label) for label in labels))
    size = (left + len(prompts) * (width + _MARGIN), top + len(rows) * (height + _MARGIN))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    for column, header in enumerate(headers):
        for number, text in enumerate(header):
            place = (left + column * (width + _MARGIN), _MARGIN + number * line)
            draw.text(place, text, fill="black", font=_font())
    for number, (label, (_, pictures)) in enumerate(zip(labels, rows, strict=True)):
        y = top + number * (height + _MARGIN)
        draw.text((_MARGIN, y + (height - line) // 2), label, fill="black", font=_font())
        for column, picture in enumerate(pictures):
            x = left + column * (width + _MARGIN)
            if picture is None:
                draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_ABSENT)
            else:
                grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), (x, y))
    return grid


@torch.no_grad()
def decode(vae: Any, latents: torch.Tensor) -> Image.Image:
    """Decode the unscaled latents [channels, height, width] of a picture."""
    first = next(vae.parameters())
    (pixels,) = vae.decode(latents[None].to(first.device, first.dtype), return_dict=False)
    values = ((pixels[0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())


def write_events(folder: Path, pictures: Pictures) -> None:
    """Write sample pictures for TensorBoard, tagged `samples/00` and so on by their prompts.

    Args:
        folder: of these event files alone; its content is replaced.
        pictures: step -> a picture for each prompt.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        if not pictures:
            return
        writer: Any = SummaryWriter(str(folder))
        for step, row in pictures.items():
            for number, picture in enumerate(row):
                if picture is not None:
                    tag, pixels = f"samples/{number:02d}", np.asarray(picture)
                    writer.add_image(tag, pixels, step, dataformats="HWC")
        writer.close()
    except Exception as error:
        raise storage_error(error, folder) or error from None


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
        atomic.write(files.grid, _png(grid))
    write_events(files.scalars / files.samples.name, pictures)
    return {
        step: [None if picture is None else _png(picture) for picture in row]
        for step, row in pictures.items()
    }


def _png(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.sd.decode ORDER`; return the exit status."""
    try:
        write_samples(read_order(Path(arguments[0]), SdOrder))
    except UserError as error:
        say_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
