"""All sample pictures of a training as one: a row for each step, a column for each prompt."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

_MARGIN = 8
_FONT_SIZE = 14
_LINE = _FONT_SIZE + 4
_LETTER = 8  # pixels; most letters are narrower
_CELL = 128  # pixels; smaller pictures are enlarged by a whole number
_HEADER_LINES = 4
_ABSENT = "#eeeeee"  # the place of a picture that cannot be drawn any more


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
    headers = [
        textwrap.wrap(prompt, width // _LETTER, max_lines=_HEADER_LINES, placeholder="…")
        for prompt in prompts
    ]
    font = ImageFont.load_default(_FONT_SIZE)
    labels = [f"step {step}" for step, _ in rows]
    left = 2 * _MARGIN + round(max(font.getlength(label) for label in labels))
    top = 2 * _MARGIN + _LINE * max(map(len, headers))
    size = (left + len(prompts) * (width + _MARGIN), top + len(rows) * (height + _MARGIN))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    for column, header in enumerate(headers):
        for number, text in enumerate(header):
            place = (left + column * (width + _MARGIN), _MARGIN + number * _LINE)
            draw.text(place, text, fill="black", font=font)
    for number, (label, (_, pictures)) in enumerate(zip(labels, rows, strict=True)):
        y = top + number * (height + _MARGIN)
        draw.text((_MARGIN, y + (height - _LINE) // 2), label, fill="black", font=font)
        for column, picture in enumerate(pictures):
            x = left + column * (width + _MARGIN)
            if picture is None:
                draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_ABSENT)
            else:
                grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), (x, y))
    return grid


def png_of(picture: Image.Image) -> bytes:
    """Return a picture as the content of a PNG file."""
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
