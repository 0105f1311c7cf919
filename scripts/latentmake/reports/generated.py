"""Contact sheet and page of the clips that a run generated.

Clips lie beside the page, which names them: they play from a disk, without a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
                "clips": [{"label": _made(clip), "source": clip.file, **size} for clip in clips],
            }
            for (prompt, seed), clips in groupby(index.clips, lambda clip: (clip.prompt, clip.seed))
        ]
        settings = [[key, str(value)] for key, value in index.settings.items()]
        data = {
            "fps": index.settings["fps"],
            "summary": "",
            "rows": rows,
            "tables": [table("settings", "Settings", "", ["setting", "value"], settings)],
        }
        text = page("gallery", f"Clips of {index.run}", data, _state(index))
        atomic.write(folder / PAGE, text.encode())
    say(f"{folder / PAGE}: {len(index.clips)} clips")
    return len(index.clips)


def _made(clip: Clip) -> str:
    return _NAMES[bool(clip.adapter)]


def _sheet(folder: Path, index: GenerationIndex) -> bytes:
    """Return a PNG with a row for each clip: its frames over time."""
    from PIL import Image

    from latentmake.training.loop.grid import draw_grid, png_of

    width, height = int(index.settings["width"]), int(index.settings["height"])
    cell = (_CELL, max(1, round(_CELL * height / width)))
    rows = [
        (
            f"{_made(clip)}, seed {clip.seed}: {clip.prompt}",
            [
                Image.fromarray(frame).resize(cell, Image.Resampling.LANCZOS)
                for frame in spread_frames(folder / clip.file, _COLUMNS)
            ],
        )
        for clip in index.clips
    ]
    return png_of(draw_grid(rows))
