"""Page of the items that a training saw, with the thumbnails of pictures that still exist.

A picture is found by its digest in the datasets of today, so it may have another name or dataset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.formats.readers import Readers
from latentmake.pages.cards import ON_PAGE, PICTURES
from latentmake.pages.page import write_page
from latentmake.pages.thumbnails import look_at
from latentmake.plan.facts import Facts
from latentmake.runs.edited import all_contents
from latentmake.runs.history import RosterItem

_GONE = "no dataset has this picture today"


def write_roster_page(
    facts: Facts | None, title: str, said: Sequence[tuple[str, str]], items: Sequence[RosterItem]
) -> Path:
    """Write a page with the items of a training, and return its path.

    Args:
        facts: facts about the project; None outside of a project.
        title: title of the page.
        said: labels and texts of the lines that describe the training.
        items: items of its roster.

    Raises:
        StorageError: the page cannot be written.
    """
    path = Path(f"reports/explain_{Path(title).stem}.html")
    shown, notes = items[:ON_PAGE], list[str]()
    if len(items) > len(shown):
        notes.append(f"{len(shown)} of {len(items)} items are shown.")
    pictures = _pictures(facts, {item.source for item in shown if item.source}) if facts else {}
    cards = [_card(item, _GONE if facts else "") for item in shown]
    with Readers() as readers:
        for number, (item, card) in enumerate(zip(shown, cards, strict=True)):
            if item.source in pictures:
                settings, today = pictures[item.source]
                embeds = number < PICTURES
                size, picture, fault = look_at(settings, today, readers, embeds=embeds)
                card |= {"path": today.image, "remote": False, "picture": picture, "fault": fault}
                card["size"] = size or item.size
    data = {
        **{"encoders": [], "faults": [], "tables": [], "training": None},
        **{"trained": False, "plans": False, "word": ""},
        "facts": [[label.capitalize(), text] for label, text in said if label != "caption"],
        "notes": notes,
        "items": cards,
        "root": f"{os.path.relpath('.', path.parent)}/",
    }
    write_page(path, "cards", title, data)
    return path


def _pictures(facts: Facts, sources: set[str]) -> dict[str, tuple[Dataset, Item]]:
    """Return digest -> dataset and item of today, for the pictures with these digests."""
    placed: dict[str, tuple[Dataset, Item]] = {}
    for dataset, item, contents in all_contents(facts):
        if (content := contents.get("source", "")) in sources:
            placed.setdefault(content, (facts.config.datasets[dataset], item))
    return placed


def _card(item: RosterItem, fault: str) -> dict[str, Any]:
    """Return the JSON values of the card of an item without a picture."""
    return {
        "dataset": item.dataset,
        "stem": item.stem,
        "path": "",
        "caption": "",
        "remote": True,  # the page looks for no file
        "size": item.size,
        "picture": None,
        "fault": fault,
        "texts": [[[text, "", ""], []] for text in item.texts],
        "targets": [],
        "stale": [],
    }
