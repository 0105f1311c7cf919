"""Pages of a run: one of its caches, training and items, and one of its texts as they are encoded.

    reports/captions_{run}.jsonl    a line for each text
    reports/captions_{run}.html     the same as cards

Where another program encodes, no tokens are counted.
"""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latentmake.errors import UserError
from latentmake.files import atomic, npz
from latentmake.files.safetensors import read_head
from latentmake.files.workspace import human
from latentmake.layouts.layout import parsed
from latentmake.models.files import vae_factor
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import run_folder
from latentmake.plan.run_plan import RunPlan, members
from latentmake.progress import duration
from latentmake.reports.cards import PICTURES, Cards, page_data, read_cards
from latentmake.reports.page import page, table
from latentmake.reports.status import StatusRow, status_of
from latentmake.training.order import JsonFile

_LATENTS = "latents"
_IMAGE, _CLIP = 3, 4  # dimensions of an image's latents [C, h, w] and of a clip's [C, F, h, w]
_WIDTH = 2400  # pixels of a picture of the training at most
_EVENTS = "events.out.tfevents*"


class _Facts(JsonFile, extra="ignore"):
    """Figures in the record of a training, whichever trainer wrote it."""

    steps: int | None = None
    seconds: float | None = None
    loss_start: float | None = None
    loss_end: float | None = None


def write_report(facts: Facts, plan: RunPlan, path: Path) -> None:
    """Write the page of a run, with at most 500 of its items.

    Raises:
        UserError: a dataset cannot be read, or the disk is full or cannot be written.
    """
    found = read_cards(facts, plan.name, most=PICTURES)
    data = page_data(facts, plan.name, found, found.cards)
    status = status_of(facts, plan)
    files = sum(row.files for row in status.rows)
    size = human(sum(row.bytes for row in status.rows))
    state = [f"{status.stale} targets stale", "warn"] if status.stale else ["all fresh", "good"]
    data["facts"] += [
        ["Cache files", f"{files}, {size}"],
        ["State", *state],
        ["Written", time.strftime("%Y-%m-%d %H:%M")],
    ]
    trained = facts.config.runs[plan.name].trainer is not None
    data["training"] = _training(plan.name) if trained else None
    data["tables"] = [_caches(status.rows), _buckets(facts, plan.name)]
    atomic.write(path, page("cards", f"Report of {plan.name}", data).encode())


# -- caches ---------------------------------------------------------------------------------------


def _caches(rows: list[StatusRow]) -> dict[str, Any]:
    words = "" if any(row.files for row in rows) else "Nothing is encoded yet."
    heads = ["dataset", "kind", ">fresh", "stale", ">orphaned", ">files", ">size"]
    lines = (
        [
            row.dataset,
            row.kind,
            str(row.fresh),
            ", ".join(f"{count} {reason}" for reason, count in row.stale.items()) or "–",
            str(row.orphans),
            str(row.files),
            human(row.bytes),
        ]
        for row in rows
    )
    return table("caches", "Caches", words, heads, lines)


def _buckets(facts: Facts, name: str) -> dict[str, Any]:
    """Return a table of the sizes of latents, by the headers of the cache files.

    Sizes are in pixels where the VAE's configuration tells how many a latent stands for. Files that
    are missing or damaged are not counted.
    """
    run = facts.config.runs[name]
    try:
        factor = vae_factor(facts.config.models[run.model].vae) or 1
    except UserError:
        factor = 1
    sizes: Counter[tuple[str, str, int, int, int]] = Counter()
    for item in members(facts, run, {}, {}):
        for part, targets in item.targets.items():
            if parsed(part).kind == _LATENTS:
                found = filter(None, (_size(path) for path, _ in targets))
                sizes.update((item.dataset, part, *size) for size in found)
    most = max(sizes.values(), default=1)
    rows: list[list[str | float]] = []
    for (dataset, part, width, height, frames), count in sorted(sizes.items()):
        size = f"{width * factor} × {height * factor}" + (f" × {frames}" if frames > 1 else "")
        rows.append([dataset, part, size, str(count), count / most])
    clips = " × frames of latents" if any(key[-1] > 1 for key in sizes) else ""
    unit = "pixels" if factor > 1 else "latents"
    words = f"Sizes as they train, in {unit}: width × height{clips}."
    heads = ["dataset", "resolution", "size", ">items", ""]
    title = "Resolutions and buckets"
    return table("buckets", title, words if sizes else "No latents yet.", heads, rows)


def _size(path: str) -> tuple[int, int, int] | None:
    """Return width, height and frames of a file's latents; None where no header tells."""
    try:
        for name, shape in _shapes(path):
            if name.startswith(_LATENTS) and len(shape) in (_IMAGE, _CLIP):
                return shape[-1], shape[-2], shape[1] if len(shape) == _CLIP else 1
    except (OSError, ValueError):
        pass
    return None


def _shapes(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if path.endswith(".npz"):
        for name, _, shape in npz.arrays_of(path):
            yield name, shape
    else:
        for name, tensor in read_head(path).tensors.items():
            yield name, tuple(tensor.shape)


# -- training -------------------------------------------------------------------------------------


def _training(run: str) -> dict[str, Any]:
    """Return figures of a run's training in words, its curves and its sample pictures."""
    folder = run_folder(run)
    record = _Facts.read(folder / "training.json") or _Facts()
    pictures = {"Curves": _curves(folder, run), "Sample pictures": _file(folder / "samples.png")}
    shown = [[name, _embedded(data)] for name, data in pictures.items() if data]
    words = [f"{record.steps} steps"] if record.steps else []
    words += [duration(record.seconds / 60)] if record.seconds else []
    if record.loss_start is not None and record.loss_end is not None:
        words.append(f"loss {record.loss_start:.4g} → {record.loss_end:.4g}")
    if not words and not shown:
        words = ["Not trained yet."]
    return {"words": " · ".join(words), "pictures": shown}


def _file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _curves(folder: Path, run: str) -> bytes | None:
    """Return the curves that the training drew, or those of its newest TensorBoard files."""
    if (drawn := _file(folder / "curves.png")) is not None:
        return drawn
    from latentmake.training.loop.pictures import curves_png

    files = sorted(folder.rglob(_EVENTS), key=lambda path: path.stat().st_mtime)
    places = dict.fromkeys(path.parent for path in reversed(files))
    return next((data for place in places if (data := curves_png(place, title=run))), None)


def _embedded(data: bytes) -> str:
    """Return a PNG as a data URI, a large one scaled down."""
    from PIL import Image

    from latentmake.reports.page import embedded

    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        image.thumbnail((_WIDTH, 2 * _WIDTH))
        return embedded(image.convert("RGB"), "webp", quality=85)


_ON_PAGE = 20_000  # items: a browser needs seconds for as many


def write_captions(facts: Facts, run: str, path: Path) -> Cards:
    """Write the texts of a run as a page, and as JSONL beside it; return them.

    Raises:
        UserError: a dataset cannot be read, or the disk is full or cannot be written.
    """
    found = read_cards(facts, run)
    atomic.write(path.with_suffix(".jsonl"), "".join(caption_lines(found)).encode())
    cards = found.cards
    if len(cards) > _ON_PAGE:
        left = len(cards) - _ON_PAGE
        found.notes.append(f"{left} more are in the JSONL file beside this page.")
        cards = sorted(cards, key=lambda card: not any(text.is_cut for text in card.texts))
    data = page_data(facts, run, found, cards[:_ON_PAGE])
    atomic.write(path, page("cards", f"Captions of {run}", data).encode())
    return found


def caption_lines(found: Cards) -> Iterator[str]:
    """Yield a line of JSON for each text."""
    for card in found.cards:
        for number, text in enumerate(card.texts):
            encoders = {
                limit.encoder: {
                    "tokens": seen.tokens,
                    "kept": seen.kept,
                    "cut": seen.rest,
                    "words": list(seen.words),
                }
                for limit, seen in zip(found.limits, text.seen, strict=True)
            }
            values = {"dataset": card.dataset, "stem": card.item.stem, "variant": number}
            yield json.dumps(values | {"text": text.text, "encoders": encoders}) + "\n"
