"""The grid of sample pictures: a row for each step, a column for each prompt.

`python -m latentmake.trainers.samples ORDER` decodes the latents a training left behind. It is a
process of its own, so that the training never has the VAE in memory.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from latentmake import cachefile
from latentmake.encoders.device import pick_device
from latentmake.encoders.vae import load_vae
from latentmake.errors import UserError
from latentmake.trainers.order import TrainingOrder, read_order
from latentmake.trainers.record import Layout, wanted
from latentmake.trainers.sampling import read_rows

__all__ = ["decode", "draw_grid", "main"]

_MARGIN = 8
_FONT_SIZE = 14
_CELL = 128  # pixels; smaller pictures are enlarged by a whole number
_HEADER_LINES = 4


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
                cut = max(
                    1, sum(font.getlength(word[:end]) <= width for end in range(1, len(word)))
                )
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
    rows: Sequence[tuple[int, Sequence[Image.Image]]], prompts: Sequence[str]
) -> Image.Image:
    """Return one picture of all sample pictures.

    Args:
        rows: (step, a picture for each prompt), all pictures of one size.
        prompts: the columns' headers.
    """
    width, height = rows[0][1][0].size
    enlarged = max(1, -(-_CELL // max(width, height)))
    width, height = width * enlarged, height * enlarged
    headers = [_wrap(prompt, width) for prompt in prompts]
    line = _FONT_SIZE + 4
    top = _MARGIN + line * max(len(header) for header in headers) + _MARGIN
    labels = [f"step {step}" for step, _ in rows]
    left = 2 * _MARGIN + round(max(_font().getlength(label) for label in labels))
    size = (
        left + len(prompts) * (width + _MARGIN),
        top + len(rows) * (height + _MARGIN),
    )
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
            resized = picture.resize((width, height), Image.Resampling.NEAREST)
            grid.paste(resized, (left + column * (width + _MARGIN), y))
    return grid


@torch.no_grad()
def decode(vae: Any, latents: torch.Tensor) -> list[Image.Image]:
    """Decode unscaled latents [pictures, channels, height, width] one by one."""
    first = next(vae.parameters())
    pictures = []
    for each in latents:
        (pixels,) = vae.decode(each[None].to(first.device, first.dtype), return_dict=False)
        values = ((pixels[0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        pictures.append(Image.fromarray(values.permute(1, 2, 0).cpu().numpy()))
    return pictures


def write_grid(order: TrainingOrder) -> bool:
    """Decode the sample pictures of a finished training and write the grid.

    Returns:
        Whether there were any.

    Raises:
        ModelError: the VAE cannot be loaded.
        StorageError: the disk is full or cannot be written.
    """
    layout = Layout(order)
    rows = read_rows(layout.samples, wanted(order))
    if not rows:
        return False
    vae = load_vae(order.vae, pick_device(), torch.float32)
    pictures = [(row.step, decode(vae, row.latents)) for row in rows]
    data = io.BytesIO()
    draw_grid(pictures, [prompt.prompt for prompt in order.prompts]).save(data, "PNG")
    cachefile.write(layout.grid, data.getvalue())
    return True


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.trainers.samples ORDER`; return the exit status."""
    try:
        write_grid(read_order(Path(arguments[0]), TrainingOrder))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
