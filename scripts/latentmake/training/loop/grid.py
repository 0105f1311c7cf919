"""Pictures as one: a row for each step of a training or clip, a column for each prompt or frame."""

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
_LABEL = 24  # letters
_ABSENT = "#eeeeee"  # the place of a picture that cannot be drawn any more


def draw_grid(
    rows: Sequence[tuple[str, Sequence[Image.Image | None]]], headers: Sequence[str] = ()
) -> Image.Image:
    """Return one picture of many.

    Args:
        rows: (label, pictures), all of one size; None leaves its place grey.
        headers: of the columns.
    """
    width, height = next(each.size for _, row in rows for each in row if each is not None)
    enlarged = max(1, -(-_CELL // max(width, height)))
    width, height = width * enlarged, height * enlarged
    font = ImageFont.load_default(_FONT_SIZE)
    heads = [_wrapped(text, width // _LETTER, _HEADER_LINES) for text in headers]
    labels = [_wrapped(label, _LABEL, max(1, height // _LINE)) for label, _ in rows]
    left = 2 * _MARGIN + round(max(font.getlength(line) for label in labels for line in label))
    top = _MARGIN + (_MARGIN + _LINE * max(map(len, heads)) if heads else 0)
    columns = max(len(row) for _, row in rows)
    size = (left + columns * (width + _MARGIN), top + len(rows) * (height + _MARGIN))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)

    def write(lines: Sequence[str], x: int, y: int) -> None:
        for number, line in enumerate(lines):
            draw.text((x, y + number * _LINE), line, fill="black", font=font)

    for column, head in enumerate(heads):
        write(head, left + column * (width + _MARGIN), _MARGIN)
    for number, (label, (_, pictures)) in enumerate(zip(labels, rows, strict=True)):
        y = top + number * (height + _MARGIN)
        write(label, _MARGIN, y + (height - _LINE * len(label)) // 2)
        for column, picture in enumerate(pictures):
            x = left + column * (width + _MARGIN)
            if picture is None:
                draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_ABSENT)
            else:
                grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), (x, y))
    return grid


def _wrapped(text: str, width: int, lines: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=lines, placeholder="…") or [""]


def png_of(picture: Image.Image) -> bytes:
    """Return a picture as the content of a PNG file."""
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
