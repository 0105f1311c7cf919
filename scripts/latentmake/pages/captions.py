"""Texts of a run as they are encoded: the tokens that each text encoder of the model keeps.

Only tokens of the text itself are counted. Special tokens (BOS and EOS of CLIP, EOS of T5) and
padding are not. Latentmake loads the tokenizers for this, but no networks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake.base.errors import SourceError, UserError
from latentmake.base.machine import counted
from latentmake.base.progress import Progress
from latentmake.config.models import Model
from latentmake.data.contents import read_caption
from latentmake.data.item import Item
from latentmake.data.texts import MARKER, marked
from latentmake.encode.tokenizers import clean_caption, load
from latentmake.layouts.layout import released_clip
from latentmake.layouts.names import encoder_name
from latentmake.models.files import T5_LENGTH, text_tokens
from latentmake.plan.facts import Facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLIP_SPECIAL, _T5_SPECIAL = 2, 1  # number of special tokens around a text
_BARS = 40  # most bars of a histogram

AWAITED = "its caption is not made yet"
"""Fault of a card whose caption a captioner has to make first."""

Cut = tuple[int, int, str, tuple[str, ...]]
"""Number of tokens in a text, number of tokens that an encoder sees (counted from the first), text
of the other tokens, and words that the encoder does not see completely, without commas."""


def cut(text: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> Cut:
    """Split a text into the part that an encoder sees and the rest.

    Args:
        text: input of the tokenizer; for Wan, the result of `caches.tokenizers.clean_caption`.
        tokenizer: tokenizer of the encoder. Without offsets, the rest is decoded from its tokens,
            so its spelling may differ.
        limit: number of tokens that the encoder keeps, as in `limits`; None for all.
    """
    placed = bool(tokenizer.is_fast)  # only fast tokenizers return offsets
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    encoded = tokenizer(text, return_offsets_mapping=placed, **options)
    ids = encoded["input_ids"]
    if limit is None or len(ids) <= limit:
        return len(ids), len(ids), "", ()
    if not placed:
        text, start = tokenizer.decode(ids[limit:], skip_special_tokens=True), 0
    else:
        start = encoded["offset_mapping"][limit][0]
    words = (match for match in re.finditer(r"[^\s,]+", text) if match.end() > start)
    return len(ids), limit, text[start:].strip(), tuple(match[0] for match in words)


def limits(model: Model) -> dict[str, int | None]:
    """Return how many tokens of a caption each text encoder of a model keeps; raises ModelError.

    Returns:
        Name of the encoder in cache files, such as text_encoder_2 (or umT5 for Wan) -> number of
        tokens. None if the encoder keeps all, or if no configuration on this disk gives the number.
    """
    kinds = model.spec.text_encoders or [""] * len(model.text)
    kept: dict[str, int | None] = {}
    for number, (kind, place) in enumerate(zip(kinds, model.text, strict=True)):
        name, longest = encoder_name(number), place.max_length or T5_LENGTH
        if kind == "umT5":
            kept[kind] = min(longest, T5_LENGTH) - _T5_SPECIAL
        elif kind == "T5":
            kept[name] = longest - _T5_SPECIAL
        elif kind:
            tokens = model.max_token_length
            kept[name] = tokens if isinstance(tokens, int) else None
        elif (own := text_tokens(place)) is None:
            kept[name] = None
        else:
            longest, is_padded = own
            kept[name] = longest - (_CLIP_SPECIAL if is_padded else _T5_SPECIAL)
    return kept


def split(text: str, seen: Sequence[Cut]) -> list[str]:
    """Return a text in three parts: kept by all encoders, by some of them, by none."""
    rests = (rest if text.endswith(rest) else "" for _, _, rest, _ in seen)
    ends = [len(text) - len(rest) for rest in rests] or [len(text)]
    return [text[: min(ends)], text[min(ends) : max(ends)], text[max(ends) :]]


class Card(NamedTuple):
    """One item of a dataset with its texts.

    Attributes:
        seen: for each text, the part that each encoder sees.
        fault: the reason why the texts cannot be read.
    """

    dataset: str
    item: Item
    texts: list[str]
    seen: list[list[Cut]]
    fault: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether at least one encoder does not see all of a text."""
        return any(kept < tokens for seen in self.seen for tokens, kept, *_ in seen)


class Cards(NamedTuple):
    """Cards of a run.

    Attributes:
        cards: one card per item.
        limits: text encoder -> number of tokens that it sees; None for all.
        faults: a line for each faulty or skipped item.
        notes: warnings, and the reason if tokens cannot be counted.
    """

    cards: list[Card]
    limits: dict[str, int | None]
    faults: list[str]
    notes: list[str]

    def encoders(self) -> list[dict[str, Any]]:
        """Return statistics of the texts' lengths, for each encoder."""
        texts = [seen for card in self.cards for seen in card.seen]
        return [
            _lengths(name, limit, [seen[number] for seen in texts])
            for number, (name, limit) in enumerate(self.limits.items())
        ]

    def lines(self) -> Iterator[str]:
        """Yield a line of JSON for each text."""
        for card in self.cards:
            for number, (text, seen) in enumerate(zip(card.texts, card.seen, strict=True)):
                encoders = {
                    encoder: dict(zip(("tokens", "kept", "cut", "words"), part, strict=True))
                    for encoder, part in zip(self.limits, seen, strict=True)
                }
                values = {"dataset": card.dataset, "stem": card.item.stem, "variant": number}
                yield json.dumps(values | {"text": text, "encoders": encoders}) + "\n"


def read_cards(facts: Facts, name: str) -> Cards:
    """Read the texts of a run's items; raises UserError."""
    run = facts.config.runs[name]
    limits, see, notes = token_counter(facts.config.models[run.model])
    cards, faults, marks = list[Card](), list[str](), set[str]()
    included: list[tuple[str, Item]] = []
    for dataset in run.datasets:
        notes += (f"warning: {line}" for line in facts.doubts(dataset, run.model))
        items, faulty = facts.items(dataset, run.model)
        skipped = {row["stem"]: row["line"] for row in facts.skipped(dataset, run.model)}
        faults += [*(fault.line for fault in faulty), *skipped.values()]
        included += [(dataset, item) for item in items if item.stem not in skipped]
    for dataset, item in Progress(included, desc=f"captions of {name}", unit="item"):
        try:
            own, fault = read_texts(item), AWAITED if item.awaits_caption else ""
            marks.update(item.where for text in own if MARKER in text)
            cards.append(Card(dataset, item, own, [*map(see, own)], fault))
        except SourceError as error:
            faults.append(str(error))
            cards.append(Card(dataset, item, [], [], str(error)))
    if awaited := sum(card.fault == AWAITED for card in cards):
        are = counted(awaited, "caption", "are")
        command = f"latentmake build captions_{name}"
        notes.append(f"{are} not made yet, or not up to date; run `{command}`")
    return Cards(cards, limits, faults, [*notes, *marked(marks)])


def read_texts(item: Item) -> list[str]:
    """Return the texts of an item as they are encoded; none if its caption is not made yet.

    Raises:
        SourceError: the caption file cannot be read.
    """
    if item.texts is not None:
        return item.texts
    return [] if item.awaits_caption else [read_caption(item.caption)]


def token_counter(
    model: Model,
) -> tuple[dict[str, int | None], Callable[[str], list[Cut]], list[str]]:
    """Return the limit of each encoder, a function that cuts a text for each encoder, and notes.

    If tokens cannot be counted, the notes say why.
    """
    try:
        kept = limits(model) if model.spec.encodes else {}
        tokenizers = [
            load(place, released_clip(model, number))
            for number, place in enumerate(model.text if kept else ())
        ]
    except UserError as error:
        return {}, lambda text: [], [f"tokens are not counted: {error}"]
    program = "the tokenizers are those of the program that encodes"
    notes = [] if kept else [f"tokens are not counted: {program}"]
    cleaned: Callable[[str], str] = clean_caption if model.spec.cleans_captions else str

    @cache
    def see(text: str) -> list[Cut]:
        return [
            cut(cleaned(text), tokenizer, limit)
            for tokenizer, limit in zip(tokenizers, kept.values(), strict=True)
        ]

    return kept, see, notes


def _lengths(name: str, limit: int | None, seen: Sequence[Cut]) -> dict[str, Any]:
    """Return statistics of the texts of one encoder, with a histogram of their lengths."""
    lengths = [tokens for tokens, *_ in seen] or [0]
    width = -(-(max(lengths) + 1) // _BARS)  # number of lengths that share a bar
    bars = [0] * (max(lengths) // width + 1)
    for length in lengths:
        bars[length // width] += 1
    return {
        "name": name,
        "limit": limit,
        "texts": len(seen),
        "cut": sum(kept < tokens for tokens, kept, *_ in seen),
        "median": median_low(lengths),
        "longest": max(lengths),
        "width": width,
        "bars": bars if seen else [],
    }
