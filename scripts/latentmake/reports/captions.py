"""Texts of a run as they are encoded: tokens for each encoder, and what is cut off.

    reports/captions_{run}.jsonl    a line for each text
    reports/captions_{run}.html     the same as cards

Where another program encodes, no tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.reports.cards import Cards, page_data, read_cards
from latentmake.reports.page import page

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
