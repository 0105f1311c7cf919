"""Pages about trainings in the histories of runs: differences of two, and the ledger of all."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latentmake.base.machine import counted
from latentmake.pages.page import FPS, as_text, table, write_page
from latentmake.runs.differences import Change, rows, summary, words
from latentmake.runs.history import SAMPLES

_ROWS = 2000  # most changes of one kind in a table
_SAMPLES = 50  # most pictures of samples on the page of the ledger


def write_diff(
    names: Sequence[str], content: Mapping[str, Any], changes: Sequence[Change] | None, folder: Path
) -> Path:
    """Write the page of the differences between two trainings, and return its path.

    Args:
        names: names of the old and the new training.
        content: values that `latentmake diff --json` prints.
        changes: changes of the items; None if they are unknown.
        folder: folder of the old training.
    """
    folders = [folder, Path(content["new"].get("folder", ""))]
    pictures = [_samples(name, place) for name, place in zip(names, folders, strict=True)]
    clips = [picture for several in pictures for picture in several]
    settings = [[*difference.values()] for difference in content["settings"]]
    figures = [[name, *map(_text, values)] for name, values in content["figures"].items()]
    title = " → ".join(map(as_text, names))
    items: list[list[Any]] = [
        [as_text(item), kind, [*words(was, now)] if was or now else ""]
        for kind, item, was, now in rows(changes or (), _ROWS)
    ]
    words_on_items = "unknown" if changes is None else summary(changes) or "no changes"
    tables = [
        table("figures", "Losses and figures", "", ["figure", ">old", ">new"], figures),
        table("settings", "Settings", "", ["setting", "old", "new"], settings),
        table("items", "Pictures and captions", "", ["item", "change", "caption"], items),
    ]
    data = {
        "fps": FPS,
        "summary": f"Items: {words_on_items}.",
        "rows": [{"title": "Samples", "clips": clips}] if clips else [],
        "tables": [shown for shown in tables if shown["rows"]],
    }
    safe = "_to_".join(Path(name).name for name in names)
    path = Path("reports", f"diff_{safe[:200]}.html")
    write_page(path, "gallery", title, data)
    return path


def write_ledger(
    heads: Sequence[str], rows: Sequence[Sequence[str]], folders: Iterable[tuple[str, str]]
) -> Path:
    """Write the page of all trainings, and return its path.

    Args:
        heads: heads of the table.
        rows: rows of the table, as texts.
        folders: time and folder of each training, for its samples.
    """
    samples = [(when, folder, _samples("samples", Path(folder))) for when, folder in folders]
    shown = [training for training in samples if training[2]][:_SAMPLES]
    data = {
        "fps": FPS,
        "summary": f"{counted(len(rows), 'training')}.",
        "rows": [
            {"title": f"{Path(folder).parts[1]}, {when[:16]}", "clips": clips}
            for when, folder, clips in shown
        ],
        "tables": [table("trainings", "Trainings", "", heads, rows)],
    }
    path = Path("reports/trainings.html")
    write_page(path, "gallery", "Trainings", data)
    return path


def _samples(label: str, folder: Path) -> list[dict[str, Any]]:
    """Return the small picture of a training's samples for a gallery; nothing if it has none."""
    from PIL import Image, UnidentifiedImageError

    place = folder / SAMPLES
    try:
        with Image.open(place, formats=["WEBP"]) as picture:
            width, height = picture.size
        data = base64.b64encode(place.read_bytes()).decode()
    except (OSError, UnidentifiedImageError):
        return []
    source = f"data:image/webp;base64,{data}"
    return [{"label": as_text(label), "source": source, "width": width, "height": height}]


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
