"""Gathers the pictures of runs and folders side by side, and embeds them in one page.

Runs meet by the texts of their prompts and by steps, folders by the names of their pictures. What
is large is made smaller; small pictures are kept as they are, pixel by pixel.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import JsonValue

from latentmake import digest
from latentmake.errors import CacheError, SourceError, TrainingError
from latentmake.files import atomic
from latentmake.pixels import decode
from latentmake.report.compared import (
    PageOrder,
    Source,
    index_of,
    pictures_in,
    state_of,
)
from latentmake.report.page import Side, View, render
from latentmake.trainers.pictures import PictureIndex

__all__ = ["Pictures", "compare", "flat", "gather", "settings_table"]

_ALL_STEPS = "*"
_WIDTH, _HEIGHT = 1024, 2048  # pixels; larger pictures are made smaller
_PIXEL_ART = 256  # pixels; pictures smaller than that are kept as they are
_PAGE = 14_000_000  # bytes of all pictures of a page; a third more as text
_LEAST, _MOST = 60_000, 400_000  # bytes of one picture, whatever their number
_QUALITIES = (90, 80, 70, 60, 50)
_READING = {"exif_rotation": True, "background": "white", "max_image_pixels": 178_956_970}
_DIGEST = 12  # digits that tell digests apart on a page

Row = tuple[str, int]
"""A prompt and which of its occurrences it is, from 0; or a picture's name."""


class Pictures:
    """Pictures on their way into a page, each of equal bytes once.

    Args:
        count: how many there will be, for how large each may be.
    """

    def __init__(self, count: int) -> None:
        self._limit = max(_LEAST, min(_MOST, _PAGE // max(1, count)))
        self._quality = 0  # index of the one that the last picture got
        self._numbers: dict[str, int] = {}
        self.embedded: list[tuple[str, int, int, bool]] = []
        self.faults: list[str] = []

    def add(self, path: Path) -> int | str:
        """Return the number of a picture, or in words why it cannot be shown."""
        try:
            data = path.read_bytes()
            name = digest.of_bytes(data)
            if name not in self._numbers:
                image = decode(data, str(path), _READING)
                self._numbers[name] = len(self.embedded)
                self.embedded.append(self._embed(image))
            return self._numbers[name]
        except SourceError as error:
            self.faults.append(f"{path}: {error.what}")
            return _shown(error.what)
        except OSError as error:
            self.faults.append(f"{path}: cannot be read ({error.strerror})")
            return f"cannot be read ({error.strerror})"

    def _embed(self, image: Image.Image) -> tuple[str, int, int, bool]:
        """Return a picture as a page holds it: data URI, width, height, whether it is pixel art."""
        data = io.BytesIO()
        if max(image.size) < _PIXEL_ART:
            image.save(data, "PNG", optimize=True)
            return _uri("png", data.getvalue()), *image.size, True
        image.thumbnail((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)
        # Most pictures of a page need about the same quality: begin a little above the last one's.
        self._quality = max(0, self._quality - 1)
        while True:
            data = io.BytesIO()
            image.save(data, "WEBP", quality=_QUALITIES[self._quality], method=2)
            if data.tell() <= self._limit:
                break
            if self._quality < len(_QUALITIES) - 1:
                self._quality += 1
            elif max(image.size) >= 2 * _PIXEL_ART:
                size = (max(1, image.width * 3 // 4), max(1, image.height * 3 // 4))
                image = image.resize(size, Image.Resampling.LANCZOS)
            else:
                break
        return _uri("webp", data.getvalue()), *image.size, False


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _shown(name: str) -> str:
    """Return a name that may hold bytes of no encoding as text that any file can hold."""
    return os.fsencode(name).decode("utf-8", "replace")


def _rows_of(index: PictureIndex) -> list[Row]:
    """Return the rows of a run: the same prompt twice is two of them."""
    seen: dict[str, int] = {}
    rows = []
    for prompt in index.prompts:
        rows.append((prompt, seen.get(prompt, 0)))
        seen[prompt] = seen.get(prompt, 0) + 1
    return rows


def _names_at(
    row: Row, steps: Sequence[int], runs: Mapping[str, PictureIndex]
) -> dict[str, list[str]]:
    """Return step -> the names that a folder's picture of this row and step may bear."""
    numbers = {rows.index(row) for index in runs.values() if row in (rows := _rows_of(index))}
    names = {
        str(step): [f"step-{step:06d}_{number:02d}" for number in sorted(numbers)] for step in steps
    }
    return {**names, _ALL_STEPS: [*(f"{number:02d}" for number in sorted(numbers)), row[0]]}


def gather(sources: Sequence[Source], say: Callable[[str], object]) -> View:
    """Bring the pictures of runs and folders together.

    Args:
        sources: at least one.
        say: is told of pictures that cannot be read, and of folders that nothing stands beside.

    Raises:
        TrainingError: a run has no pictures.
        DatasetError: a folder does not exist.
    """
    runs: dict[str, PictureIndex] = {}
    folders: dict[str, dict[str, Path]] = {}
    for source in sources:
        if source.kind == "folder":
            folders[source.name] = pictures_in(source)
        elif (index := index_of(source)) is not None:
            runs[source.name] = index
        else:
            raise TrainingError(
                f"the run {source.name} has no sample pictures",
                where=source.path,
                mend=f"make them: snakemake --cores all train_{source.name}",
            )
    steps = sorted({step for index in runs.values() for step in index.steps})
    rows: dict[Row, None] = {row: None for index in runs.values() for row in _rows_of(index)}
    names_at = {row: _names_at(row, steps, runs) for row in rows}
    expected = {name for names in names_at.values() for each in names.values() for name in each}
    for name, found in folders.items():
        others = [stem for stem in found if stem not in expected]
        if runs and others and len(others) == len(found):
            say(
                f"{name}: none of its pictures is named like those of a run "
                "(step-000500_00, 00, or a prompt): they stand alone"
            )
        rows |= {(stem, -1): None for stem in others}
    count = sum(len(index.steps) * len(index.prompts) for index in runs.values())
    pictures = Pictures(count + sum(len(found) for found in folders.values()))
    sides = []
    for source in sources:
        if source.kind == "run":
            cells = _cells_of_run(Path(source.path), runs[source.name], list(rows), pictures)
        else:
            cells = [
                _cells_of_folder(folders[source.name], row, names_at.get(row, {}), pictures)
                for row in rows
            ]
        sides.append(Side(source.name, source.kind, cells))
    for fault in pictures.faults:
        say(f"not shown: {fault}")
    return View(
        title=" vs ".join(source.name for source in sources),
        sides=sides,
        rows=[_label(*row) for row in rows],
        rows_are="prompt" if runs else "picture",
        steps=steps,
        pictures=pictures.embedded,
        runs=list(runs),
        settings=settings_table([index.settings for index in runs.values()]),
    )


def _label(name: str, occurrence: int) -> str:
    name = _shown(name) or "(the empty prompt)"
    return f"{name} ({occurrence + 1})" if occurrence > 0 else name


def _cells_of_run(
    folder: Path, index: PictureIndex, rows: list[Row], pictures: Pictures
) -> list[dict[str, int | str]]:
    own = _rows_of(index)
    return [
        {
            str(step): pictures.add(folder / name)
            for step, names in zip(index.steps, index.files, strict=True)
            if (name := names[own.index(row)]) is not None
        }
        if row in own
        else {}
        for row in rows
    ]


def _cells_of_folder(
    found: Mapping[str, Path], row: Row, names_at: Mapping[str, list[str]], pictures: Pictures
) -> dict[str, int | str]:
    names = names_at or {_ALL_STEPS: [row[0]]}
    there = {step: [each for each in those if each in found] for step, those in names.items()}
    return {step: pictures.add(found[those[0]]) for step, those in there.items() if those}


def flat(settings: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Return nested settings as one level, names joined by dots."""
    found: dict[str, JsonValue] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _text(key: str, value: JsonValue) -> str:
    if key in ("weights", "data") and isinstance(value, str):
        return value[:_DIGEST]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings_table(settings: Sequence[Mapping[str, JsonValue]]) -> list[tuple[str, list[str]]]:
    """Return the settings of runs side by side: (name, a text for each run, "–" for none)."""
    levels = [flat(each) for each in settings]
    keys: dict[str, Any] = {key: None for level in levels for key in level}
    return [
        (key, [_text(key, level[key]) if key in level else "–" for level in levels]) for key in keys
    ]


def compare(order_path: Path, page: Path, say: Callable[[str], object]) -> None:
    """Write the page of an order.

    Args:
        order_path: a JSON file.
        page: the page.
        say: is told what was written.

    Raises:
        UserError: there are no pictures, or the disk is full; one line.
    """
    try:
        order = PageOrder.model_validate_json(order_path.read_bytes())
    except (OSError, ValueError):
        raise CacheError(
            "the order of the page is missing or damaged",
            where=order_path,
            mend="give the same command again, which writes it anew",
        ) from None
    view = gather(order.sources, say)
    text = render(view, state_of(order.sources, digest.of_file)).encode()
    atomic.write(page, text)
    say(f"{page}: {len(view.pictures)} pictures, {len(text) / 1e6:.1f} MB")
