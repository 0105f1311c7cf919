"""Comparison page: sample pictures and clips of runs and of folders, side by side.

Runs are matched by prompt text and step, generated clips by prompt and seed, folders by the names
of their files.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from latentmake import digest
from latentmake.errors import CacheError, TrainingError
from latentmake.files import atomic
from latentmake.reports.clips import FPS, ClipSources
from latentmake.reports.comparison_order import (
    PLAYED,
    PageOrder,
    Source,
    generated_folder,
    generated_of,
    index_of,
    pictures_in,
    state_of,
)
from latentmake.reports.images import Pictures, as_text
from latentmake.reports.page import page
from latentmake.training.generation import GenerationIndex
from latentmake.training.loop.sample_images import PictureIndex, picture_name

__all__ = ["Side", "View", "compare", "flat", "gather", "settings_table"]

_ALL_STEPS = "*"
_DIGEST = 12  # digits of a digest on a page


class Row(NamedTuple):
    """A row of a page.

    Attributes:
        name: a prompt, or a picture's name.
        occurrence: of the prompt, from 0; -1 of a picture.
        seed: of a generated clip.
    """

    name: str
    occurrence: int = 0
    seed: int | None = None


Place = tuple[Row, str]
"""A row, and a step in digits or `*` for all."""

Cells = dict[str, int | str]
"""Step -> number of a picture, or why it cannot be shown."""


class Side(NamedTuple):
    """A run or a folder, with its cells in each row; `kind` is `run` or `folder`."""

    name: str
    kind: str
    cells: list[Cells]


class View(NamedTuple):
    """Data of a comparison page.

    Attributes:
        rows: prompts, or names of pictures.
        rows_are: `prompt` or `picture`.
        steps: of all runs, ascending; none of folders alone.
        pictures: address, width and height in pixels, whether to show it pixel by pixel.
        runs: names of the settings' columns.
        settings: (name, a text for each run).
        clips: numbers of the pictures that are clips.
        fps: frames a second of the clips.
    """

    title: str
    sides: list[Side]
    rows: list[str]
    rows_are: str
    steps: list[int]
    pictures: list[tuple[str, int, int, bool]]
    runs: list[str]
    settings: list[tuple[str, list[str]]]
    clips: Sequence[int] = ()
    fps: float = FPS

    def page(self, state: str) -> str:
        """Return the page; `state` is the digest of what it shows."""
        sides = [side._asdict() for side in self.sides]
        return page("compare", self.title, {**self._asdict(), "sides": sides}, state)


def _rows_of(index: PictureIndex) -> list[Row]:
    """Return the rows of a run: a prompt given twice has two."""
    seen: Counter[str] = Counter()
    rows = []
    for prompt in index.prompts:
        rows.append(Row(prompt, seen[prompt]))
        seen[prompt] += 1
    return rows


def _places(runs: Collection[PictureIndex], steps: Sequence[int]) -> dict[str, list[Place]]:
    """Return name of a folder's picture -> rows and steps of runs that it belongs to."""
    places: defaultdict[str, list[Place]] = defaultdict(list)
    for index in runs:
        for number, row in enumerate(_rows_of(index)):
            names = {Path(picture_name(step, number)).stem: str(step) for step in steps}
            for name, step in {**names, f"{number:02d}": _ALL_STEPS, row.name: _ALL_STEPS}.items():
                if (row, step) not in places[name]:
                    places[name].append((row, step))
    return places


def _of_run(folder: Path, index: PictureIndex) -> dict[Place, Path]:
    return {
        (row, str(step)): folder / name
        for step, names in zip(index.steps, index.files, strict=True)
        for row, name in zip(_rows_of(index), names, strict=True)
        if name is not None
    }


def _of_folder(
    pictures: Mapping[str, Path], places: Mapping[str, list[Place]]
) -> dict[Place, Path]:
    found: dict[Place, Path] = {}
    for stem, path in pictures.items():
        for place in places.get(stem, [(Row(stem, -1), _ALL_STEPS)]):
            found.setdefault(place, path)
    return found


def _of_generated(folder: Path, index: GenerationIndex) -> dict[Place, Path]:
    """Return the clips with the adapter."""
    return {
        (Row(clip.prompt, seed=clip.seed), _ALL_STEPS): folder / clip.file
        for clip in index.clips
        if clip.adapter
    }


def _check(source: Source, index: PictureIndex | None, made: GenerationIndex | None) -> None:
    if index is not None or made is not None:
        return
    raise TrainingError(
        f"the run {source.name} has no sample pictures",
        where=source.path,
        hint=f"make them: snakemake --cores all train_{source.name}",
    )


def gather(
    sources: Sequence[Source], say: Callable[[str], object], page: Path = Path("page.html")
) -> View:
    """Collect the pictures and clips of runs and folders; `say` receives warnings.

    Many clips are not embedded in the page, but named by the way to them from its place.

    Raises:
        TrainingError: a run has no pictures.
        DatasetError: a folder does not exist.
    """
    runs: dict[str, PictureIndex] = {}
    made: dict[str, GenerationIndex] = {}
    for source in (source for source in sources if source.kind == "run"):
        index, generated = index_of(source), generated_of(source)
        _check(source, index, generated)
        runs |= {} if index is None else {source.name: index}
        made |= {} if generated is None else {source.name: generated}
    steps = sorted({step for index in runs.values() for step in index.steps})
    places = _places(runs.values(), steps)
    found: dict[str, dict[Place, Path]] = {}
    for source in sources:
        if source.kind == "run":
            folder, found[source.name] = Path(source.path), {}
            if (index := runs.get(source.name)) is not None:
                found[source.name] |= _of_run(folder, index)
            if (generated := made.get(source.name)) is not None:
                found[source.name] |= _of_generated(generated_folder(source), generated)
            continue
        pictures_of = pictures_in(source)
        found[source.name] = _of_folder(pictures_of, places)
        if runs and pictures_of and not places.keys() & pictures_of:
            say(
                f"{source.name}: none of its pictures is named like those of a run "
                "(step-000500_00, 00, or a prompt): each gets a row of its own"
            )
    rows: dict[Row, None] = {row: None for index in runs.values() for row in _rows_of(index)}
    rows |= {row: None for each in found.values() for row, _ in each}
    files = [path for each in found.values() for path in each.values()]
    clips = [path for path in files if path.suffix.lower() in PLAYED]
    pictures = Pictures(len(files) - len(clips), ClipSources(page, clips))
    sides = []
    for source in sources:
        cells: dict[Row, Cells] = {row: {} for row in rows}
        for (row, step), path in found[source.name].items():
            cells[row][step] = pictures.add(path)
        sides.append(Side(source.name, source.kind, list(cells.values())))
    for fault in pictures.faults:
        say(f"not shown: {fault}")
    return View(
        title=" vs ".join(source.name for source in sources),
        sides=sides,
        rows=[_label(row) for row in rows],
        rows_are="prompt" if runs or made else "picture",
        steps=steps,
        pictures=pictures.embedded,
        clips=pictures.clips,
        fps=max((float(index.settings.get("fps", FPS)) for index in made.values()), default=FPS),
        runs=list(dict.fromkeys([*runs, *made])),
        settings=settings_table(
            [
                (runs[name].settings if name in runs else {})
                | ({"generate": {**made[name].settings}} if name in made else {})
                for name in dict.fromkeys([*runs, *made])
            ]
        ),
    )


def _label(row: Row) -> str:
    name = as_text(row.name) or "(the empty prompt)"
    if row.seed is not None:
        return f"{name} (seed {row.seed})"
    return f"{name} ({row.occurrence + 1})" if row.occurrence > 0 else name


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
    """Return the settings of runs: (name, a text for each run, "–" for a missing one)."""
    levels = [flat(each) for each in settings]
    keys: dict[str, Any] = {key: None for level in levels for key in level}
    return [
        (key, [_text(key, level[key]) if key in level else "–" for level in levels]) for key in keys
    ]


def compare(order_path: Path, page: Path, say: Callable[[str], object]) -> None:
    """Write the page of an order; `say` receives warnings, and its size.

    Raises:
        UserError: there are no pictures, or the disk is full.
    """
    try:
        order = PageOrder.model_validate_json(order_path.read_bytes())
    except (OSError, ValueError):
        raise CacheError(
            "the order of the page is missing or damaged",
            where=order_path,
            hint="give the same command again, which writes it anew",
        ) from None
    view = gather(order.sources, say, page)
    text = view.page(state_of(order.sources, digest.of_file)).encode()
    atomic.write(page, text)
    say(f"{page}: {len(view.pictures)} pictures, {len(text) / 1e6:.1f} MB")
