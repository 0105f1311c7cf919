"""Cards of a run's items for a page: picture with its crops, all texts, edits since training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latentmake.base.errors import SourceError
from latentmake.base.machine import usable_cores
from latentmake.base.progress import Progress
from latentmake.config.datasets import Dataset
from latentmake.formats.readers import Readers
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import resolution_of
from latentmake.pages.captions import Card, Cards, split
from latentmake.pages.thumbnails import look_at
from latentmake.plan.facts import Facts
from latentmake.plan.product import some
from latentmake.runs.edited import edits_since

PICTURES = 500
"""Number of cards whose picture is embedded; further cards show the picture file itself."""
ON_PAGE = 20_000
"""Most cards on a page: a browser needs seconds to show this many."""

Stale = Mapping[tuple[str, str], Sequence[str]]
"""Dataset and stem -> its stale targets, such as `text: edited`."""


def page_data(
    facts: Facts, name: str, run_cards: Cards, page: Path, stale: Stale | None = None
) -> dict[str, Any]:
    """Return the JSON values of a page that shows the cards of a run.

    The sections for training and tables are empty.
    """
    run, datasets = facts.config.runs[name], facts.config.datasets
    titles = {
        dataset: f"{dataset} (regularisation)" if datasets[dataset].is_reg else dataset
        for dataset in run.datasets
    }
    cards, notes = run_cards.cards, [*run_cards.notes]
    since = edits_since(facts, name)
    edits, gone = since or ({}, [])
    if len(cards) > ON_PAGE:
        notes.append(f"{ON_PAGE} of {len(cards)} items are shown, those with cut texts first.")
        cards = sorted(cards, key=lambda card: not card.is_cut)
    elif gone:
        notes.append(f"The training also saw {some(gone)}, which the dataset has no more.")

    cards = cards[:ON_PAGE]

    def values(number: int) -> dict[str, Any]:
        card = cards[number]
        settings, embeds = datasets[card.dataset], number < PICTURES
        size, picture, fault = look_at(settings, card.item, readers, embeds=embeds)
        place = card.dataset, card.item.stem
        return {
            "dataset": titles.get(card.dataset, card.dataset),
            "stem": card.item.stem,
            "path": card.item.image,
            "caption": card.item.caption or card.item.place,
            "remote": card.item.is_remote,
            "size": size,
            "picture": picture,
            "fault": card.fault or fault,
            "by": ", ".join(card.item.captioners),
            "texts": [
                [split(text, seen), [part[:2] for part in seen]]
                for text, seen in zip(card.texts, card.seen, strict=True)
            ],
            "targets": [
                _target(facts, name, card, resolution.name, size) for resolution in run.resolutions
            ],
            "stale": (stale or {}).get(place, []),
            **edits.get("/".join(place), {}),
        }

    with Readers() as readers, ThreadPoolExecutor(usable_cores()) as pool:
        made = pool.map(values, range(len(cards)))
        items = [*Progress(made, desc=f"images of {name}", unit="image", total=len(cards))]
    return {
        "facts": [["Run", name], ["Model", run.model], ["Datasets", ", ".join(titles.values())]],
        "encoders": run_cards.encoders(),
        "faults": run_cards.faults,
        "notes": notes,
        "items": items,
        "root": f"{os.path.relpath('.', page.parent)}/",
        "trained": since is not None,
        "plans": stale is not None,
        "word": next(filter(None, (_trigger(datasets[name]) for name in run.datasets)), ""),
        "tables": [],
        "training": None,
    }


def _trigger(settings: Dataset) -> str:
    """Return the words that the configuration adds to every caption of a dataset; "" if none."""
    making = settings.captions
    around = (making.caption_prefix, making.caption_suffix) if making else ()
    words = ((text or "").strip(" ,.\n") for text in (settings.class_tokens, *around))
    return next((word for word in words if word and "{" not in word), "")


def _target(
    facts: Facts, run: str, card: Card, resolution: str, size: Size | None
) -> dict[str, Any]:
    """Return how an image is scaled and cropped for a resolution.

    Returns:
        `words` (a line of text), `crop` (left, top, right and bottom of the kept part, as shares
        of width and height) and `enlarged` (whether the image is scaled up).
    """
    resolution_size = resolution_of(resolution)
    if size is None or resolution_size is None:
        return {"words": resolution, "crop": None}
    layout, settings = facts.layout(facts.config.runs[run].model), facts.config.datasets
    try:
        resized, left, top, target = layout.place(size, resolution_size, settings[card.dataset])
    except SourceError as error:
        return {"words": f"{resolution}: {error.what}", "crop": None}
    ends = (left, top, left + target.width, top + target.height)
    shares = [round(min(end / side, 1.0), 3) for end, side in zip(ends, 2 * resized, strict=True)]
    enlarged = resized.width > size.width or resized.height > size.height
    words = f"{resolution} → {target.width} × {target.height}"
    return {"words": words, "crop": shares, "enlarged": enlarged}
