"""Texts of a run as they are encoded: tokens for each encoder, and what is cut off.

    reports/captions_{run}.jsonl    a line for each text
    reports/captions_{run}.html     the same as a page, with small pictures

Tokenizers are loaded, networks are not. Where another program encodes, no tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from latentmake.config import Model
from latentmake.errors import SourceError, UserError
from latentmake.files import atomic
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.models import tokenizers as tokens
from latentmake.progress import Progress
from latentmake.reports.captions_order import Captioned, CaptionsOrder
from latentmake.reports.images import decoded, embedded
from latentmake.reports.page import page
from latentmake.sources import s3
from latentmake.sources.caption_files import read_caption

__all__ = ["summary", "texts_of", "token_counter", "write_captions"]

_ON_PAGE = 20_000  # texts: a browser needs a second for as many
_PICTURES = 200  # items with a picture on the page
_SIDE = 96  # pixels of such a picture
_BARS = 40  # of a histogram


class _Text(NamedTuple):
    """One text of an item, and what each encoder keeps of it."""

    text: str
    seen: list[tokens.Cut]

    @property
    def is_cut(self) -> bool:
        return any(each.kept < each.tokens for each in self.seen)

    @property
    def split(self) -> list[str]:
        """The text in three parts: kept by all encoders, by some of them, by none."""
        ends = [
            len(self.text) - len(seen.rest) if self.text.endswith(seen.rest) else len(self.text)
            for seen in self.seen
        ] or [len(self.text)]
        first, last = min(ends), max(ends)
        return [self.text[:first], self.text[first:last], self.text[last:]]


_Row = tuple[Captioned, list[_Text]]
_Counter = Callable[[str], list[tokens.Cut]]


def write_captions(
    order: CaptionsOrder, lines: Path, html: Path, say: Callable[[str], object]
) -> None:
    """Write the texts of a run as JSONL and as a page; `say` receives counts and faults.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    limits, see, note = token_counter(order.model)
    if note:
        say(note)
    faults = list(order.faults)
    rows: list[_Row] = []
    for item in Progress(order.items, desc=f"captions of {order.run}", unit="item"):
        try:
            rows.append(
                (item, [_Text(text, see(text)) for text in texts_of(item.caption, item.texts)])
            )
        except SourceError as error:
            faults.append(str(error))
    listed = [json.dumps(line) + "\n" for row in rows for line in _lines(*row, limits)]
    atomic.write(lines, "".join(listed).encode())
    data = _data(order.run, rows, limits, faults)
    atomic.write(html, page("captions", f"Captions of {order.run}", data).encode())
    for found in data["encoders"]:
        say(
            f"{found['name']}: {found['cut']} of {found['texts']} texts are cut, the longest has "
            f"{found['longest']} tokens"
        )
    for fault in faults:
        say(f"faulty: {fault}")
    say(f"{html}")


def token_counter(model: Model) -> tuple[list[tokens.Limit], _Counter, str]:
    """Return the limit of each encoder, and a function from a text to what each keeps of it.

    Equal texts are cut once. Where tokens cannot be counted, the third value says why.
    """
    try:
        limits = tokens.limits(model) if model.spec.encodes else []
        tokenizers = [tokens.load(place) for place in (model.text if limits else ())]
    except UserError as error:
        return [], lambda text: [], f"tokens are not counted: {error}"
    program = "the tokenizers are those of the program that encodes"
    note = "" if limits else f"tokens are not counted: {program}"
    cleaned: Callable[[str], str] = str
    if model.spec.cleans_captions:
        from latentmake.caches.encoders.umt5 import clean_caption

        cleaned = clean_caption

    @cache
    def see(text: str) -> list[tokens.Cut]:
        return [
            tokens.cut(cleaned(text), tokenizer, limit.tokens)
            for tokenizer, limit in zip(tokenizers, limits, strict=True)
        ]

    return limits, see, note


def texts_of(caption: str | None, texts: list[str] | None) -> list[str]:
    """Return the variants of an item's text, or the text of its caption file.

    Raises:
        SourceError: the caption file cannot be read.
    """
    if texts is not None:
        return texts
    return ["" if caption is None else read_caption(caption)]


def _lines(
    item: Captioned, texts: list[_Text], limits: list[tokens.Limit]
) -> list[dict[str, object]]:
    return [
        {
            "dataset": item.dataset,
            "stem": item.stem,
            "variant": number,
            "text": each.text,
            "encoders": {
                limit.encoder: {
                    "tokens": seen.tokens,
                    "kept": seen.kept,
                    "cut": seen.rest,
                    "words": list(seen.words),
                }
                for limit, seen in zip(limits, each.seen, strict=True)
            },
        }
        for number, each in enumerate(texts)
    ]


# -- the page -------------------------------------------------------------------------------------


def _data(
    run: str, rows: list[_Row], limits: list[tokens.Limit], faults: list[str]
) -> dict[str, Any]:
    datasets = sorted({item.dataset for item, _ in rows})
    return {
        "run": run,
        "encoders": [
            summary(limit, [text.seen[index] for _, texts in rows for text in texts])
            for index, limit in enumerate(limits)
        ],
        "datasets": datasets,
        "items": [
            {
                "dataset": datasets.index(item.dataset),
                "stem": item.stem,
                "picture": _picture(item) if number < _PICTURES else None,
                "texts": [[text.split, [seen[:2] for seen in text.seen]] for text in texts],
            }
            for number, (item, texts) in enumerate(_shown(rows))
        ],
        "total": len(rows),
        "faults": faults,
    }


def _shown(rows: list[_Row]) -> list[_Row]:
    """Return as many items as fit on a page, those with a cut text first."""
    if sum(len(texts) for _, texts in rows) <= _ON_PAGE:
        return rows
    found: list[_Row] = []
    texts = 0
    for row in sorted(rows, key=lambda row: not any(text.is_cut for text in row[1])):
        texts += len(row[1])
        if texts > _ON_PAGE and found:
            break
        found.append(row)
    return found


def summary(limit: tokens.Limit, seen: Sequence[tokens.Cut]) -> dict[str, Any]:
    """Return the lengths of all texts as one encoder sees them, with a histogram of them."""
    lengths = [each.tokens for each in seen] or [0]
    width = max(1, -(-(max(lengths) + 1) // _BARS))  # tokens of a bar
    bars = [0] * (max(lengths) // width + 1)
    for length in lengths:
        bars[length // width] += 1
    return {
        "name": limit.encoder,
        "limit": limit.tokens,
        "texts": len(seen),
        "cut": sum(each.kept < each.tokens for each in seen),
        "median": median_low(lengths),
        "longest": max(lengths),
        "width": width,
        "bars": bars if seen else [],
    }


def _picture(item: Captioned) -> str | None:
    """Return a small picture of an item; None for a video, a remote or a damaged image."""
    path = Path(item.image)
    if path.suffix.lower() in VIDEO_EXTENSIONS or s3.is_remote(item.image):
        return None
    try:
        image = decoded(path.read_bytes(), path)
    except (SourceError, OSError):
        return None  # a build names the fault
    image.thumbnail((_SIDE, _SIDE))
    return embedded(image, "webp", quality=75)
