"""Contact sheet and page of the clips that a run generated.

Clips lie beside the page, which names them: they play from a disk, without a server.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from latentmake import digest
from latentmake.errors import StorageError
from latentmake.files import atomic
from latentmake.files.mp4 import spread_frames
from latentmake.plan.reasons import Difference
from latentmake.reports.page import page, state_in, table, template_digest
from latentmake.training.backend import Backend
from latentmake.training.wan.generation import FOLDER, INDEX, Clip, GenerationIndex

PAGE = "index.html"
SHEET = "contact_sheet.png"

_NAMES = ("base", "with the adapter")
_COLUMNS = 6
_CELL = 208  # pixels: width of a frame on the sheet
_MARGIN, _LINE, _FONT = 8, 18, 14


def _state(index: GenerationIndex) -> str:
    """Return the digest of all that page and sheet show."""
    return digest.of_value([index.model_dump(), template_digest("gallery")])


def page_reasons(folder: Path) -> list[Difference]:
    """Return why page and contact sheet of a folder do not show the clips of its index."""
    index = GenerationIndex.read(folder / INDEX)
    if index is None or state_in(folder / PAGE) != _state(index):
        return [Difference(f"{folder / PAGE} does not show these clips")]
    sheet = folder / SHEET
    return [] if sheet.is_file() else [Difference(f"{sheet} is missing")]


def write_generated(
    backend: Backend,
    order: Path,
    *,
    log: Path,
    receipt: Path,
    threads: int,
    say: Callable[[str], object],
) -> None:
    """Bring the clips of an order up to date by its trainer, and write their page and the receipt.

    Raises:
        UserError: clips cannot be drawn or decoded, or the disk is full.
    """
    folder = receipt.with_name(FOLDER)
    backend.follow(order, "generate", log=log, threads=threads)
    clips = write_pages(folder, say)
    atomic.write(receipt, json.dumps({"clips": clips, "page": str(folder / PAGE)}).encode())


def write_pages(folder: Path, say: Callable[[str], object]) -> int:
    """Write page and contact sheet of the clips in a folder; return the number of clips."""
    index = GenerationIndex.read(folder / INDEX)
    if index is None:
        hint = "run the same command again, which writes it anew"
        raise StorageError("the index of the clips is gone", where=folder / INDEX, hint=hint)
    if page_reasons(folder):
        atomic.write(folder / SHEET, _sheet(folder, index))
        size = {key: index.settings[key] for key in ("width", "height")}
        rows = [
            {
                "title": prompt,
                "note": f"seed {seed}",
                "clips": [
                    {"label": _made(clip), "source": clip.file, **size}
                    for clip in _both(list(clips))
                ],
            }
            for (prompt, seed), clips in groupby(index.clips, key=_row)
        ]
        settings = [[key, str(value)] for key, value in index.settings.items()]
        data = {
            "fps": index.settings["fps"],
            "summary": "" if rows else "No clips yet.",
            "rows": rows,
            "tables": [table("settings", "Settings", "", ["setting", "value"], settings)],
        }
        text = page("gallery", f"Clips of {index.run}", data, _state(index))
        atomic.write(folder / PAGE, text.encode())
    say(f"{folder / PAGE}: {len(index.clips)} clips")
    return len(index.clips)


def _row(clip: Clip) -> tuple[str, int]:
    return clip.prompt, clip.seed


def _both(clips: Sequence[Clip]) -> list[Clip]:
    """Return the clips of a prompt and seed, that of the base first."""
    return sorted(clips, key=lambda clip: bool(clip.adapter))


def _made(clip: Clip) -> str:
    return _NAMES[bool(clip.adapter)]


def _sheet(folder: Path, index: GenerationIndex) -> bytes:
    """Return a PNG: a prompt and seed after another, each clip's frames over time in a row."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT)
    width, height = int(index.settings["width"]), int(index.settings["height"])
    cell = (_CELL, max(1, round(_CELL * height / width)))
    columns = min(_COLUMNS, int(index.settings["frames"]))
    step = cell[1] + _MARGIN
    groups = [(row, _both(list(clips))) for row, clips in groupby(index.clips, key=_row)]
    left = 2 * _MARGIN + round(max(map(font.getlength, _NAMES)))
    total = sum(_LINE + _MARGIN + step * len(clips) for _, clips in groups) + _MARGIN
    sheet = Image.new("RGB", (left + columns * (cell[0] + _MARGIN), total), "white")
    pen = ImageDraw.Draw(sheet)
    y = _MARGIN
    for (prompt, seed), clips in groups:
        pen.text((_MARGIN, y), _cut(f"seed {seed}: {prompt}", sheet.width, font), "black", font)
        y += _LINE + _MARGIN
        for clip in clips:
            pen.text((_MARGIN, y + (cell[1] - _LINE) // 2), _made(clip), "black", font)
            for column, frame in enumerate(spread_frames(folder / clip.file, columns)):
                x = left + column * (cell[0] + _MARGIN)
                sheet.paste(Image.fromarray(frame).resize(cell, Image.Resampling.LANCZOS), (x, y))
            y += step
    data = io.BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()


def _cut(text: str, width: int, font: object) -> str:
    """Return as much of a text, in one line, as fits into a width in pixels."""
    text = " ".join(text.split())
    length = font.getlength  # type: ignore[attr-defined]
    if length(text) <= width - 2 * _MARGIN:
        return text
    while text and length(text + "…") > width - 2 * _MARGIN:
        text = text[:-1]
    return text + "…"
