"""Cards of a run's items: a picture with its crops, every text with its tokens.

The pages of `captions` and `report` show the same cards. Tokenizers are loaded, networks are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake.caches.tokenizers import clean_caption, load
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data.item import Item
from latentmake.data.texts import read_caption
from latentmake.errors import SourceError, UserError
from latentmake.files.media import NPZ, VIDEO_EXTENSIONS
from latentmake.files.readers import Readers
from latentmake.files.workspace import is_remote, usable_cores
from latentmake.geometry.buckets import Placement, Size
from latentmake.geometry.clips import Span
from latentmake.layouts.layout import Layout, parsed
from latentmake.plan.facts import Facts
from latentmake.progress import Progress
from latentmake.reports.kept_tokens import Cut, Limit, cut, limits

if TYPE_CHECKING:
    from PIL import Image

PICTURES = 500
"""Cards with a picture on a page."""
_SIDE = 192  # pixels of a picture
_BARS = 40  # of a histogram


class Text(NamedTuple):
    """One text of an item, and what each encoder keeps of it."""

    text: str
    seen: list[Cut]

    @property
    def is_cut(self) -> bool:
        """Whether an encoder does not see all of it."""
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


class Card(NamedTuple):
    """One item of a dataset with its texts; `fault` says why they cannot be read."""

    dataset: str
    item: Item
    texts: list[Text]
    fault: str = ""


class Cards(NamedTuple):
    """Cards of a run.

    Attributes:
        cards: one an item.
        limits: number of tokens that each text encoder sees.
        faults: a line for each item that is faulty or skipped.
        notes: lines about what is missing.
        total: number of the run's items.
    """

    cards: list[Card]
    limits: list[Limit]
    faults: list[str]
    notes: list[str]
    total: int

    def encoders(self) -> list[dict[str, Any]]:
        """Return the lengths of all texts as each encoder sees them."""
        texts = [text for card in self.cards for text in card.texts]
        return [
            _lengths(limit, [text.seen[number] for text in texts])
            for number, limit in enumerate(self.limits)
        ]


def read_cards(facts: Facts, name: str, most: int | None = None) -> Cards:
    """Read the texts of a run's items, or of `most` of them, spread evenly.

    Raises:
        UserError: a dataset cannot be read.
    """
    run = facts.config.runs[name]
    limits, see, note = token_counter(facts.config.models[run.model])
    notes = [note] if note else []
    faults: list[str] = []
    found: list[tuple[str, Item]] = []
    for dataset in run.datasets:
        items, faulty = facts.items(dataset, run.model)
        skipped = {each["stem"]: each["line"] for each in facts.skipped(dataset)}
        faults += [*(fault.line for fault in faulty), *skipped.values()]
        found += [(dataset, item) for item in items if item.stem not in skipped]
    total = len(found)
    if most is not None and total > most:
        found = [found[index * (total - 1) // max(1, most - 1)] for index in range(most)]
        notes.append(f"{most} of {total} items are shown, spread evenly.")
    cards = []
    for dataset, item in Progress(found, desc=f"captions of {name}", unit="item"):
        try:
            texts = [Text(text, see(text)) for text in _texts(item)]
            cards.append(Card(dataset, item, texts))
        except SourceError as error:
            faults.append(str(error))
            cards.append(Card(dataset, item, [], str(error)))
    return Cards(cards, limits, faults, notes, total)


def page_data(facts: Facts, name: str, found: Cards, cards: Sequence[Card]) -> dict[str, Any]:
    """Return what a page shows of some cards of a run, as JSON values; other sections are empty."""
    run = facts.config.runs[name]
    layout = facts.layout(run.model)

    def values(numbered: tuple[int, Card]) -> dict[str, Any]:
        number, card = numbered
        settings = facts.config.datasets[card.dataset]
        look = _look_at(card.item, settings, readers) if number < PICTURES else _Look(None, None)
        crops = [_crop(layout, size.name, look.size, settings) for size in run.resolutions]
        return {
            "dataset": card.dataset,
            "stem": card.item.stem,
            "path": card.item.image,
            "size": "" if look.size is None else f"{look.size.width} × {look.size.height}",
            "picture": look.picture,
            "fault": card.fault or look.fault,
            "texts": [[text.split, [seen[:2] for seen in text.seen]] for text in card.texts],
            "targets": crops if number < PICTURES else [],
        }

    with Readers() as readers, ThreadPoolExecutor(usable_cores()) as pool:
        made = pool.map(values, enumerate(cards))
        bar = Progress(made, desc=f"images of {name}", unit="image", total=len(cards))
        items = [*bar]
    return {
        "facts": [["Run", name], ["Model", run.model], ["Datasets", ", ".join(run.datasets)]],
        "encoders": found.encoders(),
        "faults": found.faults,
        "notes": found.notes,
        "items": items,
        "tables": [],
        "training": None,
    }


# -- texts ----------------------------------------------------------------------------------------


def token_counter(
    model: Model,
) -> tuple[list[Limit], Callable[[str], list[Cut]], str]:
    """Return the limit of each encoder, and a function from a text to what each keeps of it.

    Equal texts are cut once. Where tokens cannot be counted, the third value says why.
    """
    try:
        kept = limits(model) if model.spec.encodes else []
        tokenizers = [load(place) for place in (model.text if kept else ())]
    except UserError as error:
        return [], lambda text: [], f"tokens are not counted: {error}"
    program = "the tokenizers are those of the program that encodes"
    note = "" if kept else f"tokens are not counted: {program}"
    cleaned: Callable[[str], str] = str
    if model.spec.cleans_captions:
        cleaned = clean_caption

    @cache
    def see(text: str) -> list[Cut]:
        return [
            cut(cleaned(text), tokenizer, limit.tokens)
            for tokenizer, limit in zip(tokenizers, kept, strict=True)
        ]

    return kept, see, note


def _texts(item: Item) -> list[str]:
    """Return the variants of an item's text, or the text of its caption file."""
    if item.texts is not None:
        return item.texts
    return ["" if item.caption is None else read_caption(item.caption)]


def _lengths(limit: Limit, seen: Sequence[Cut]) -> dict[str, Any]:
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


# -- pictures -------------------------------------------------------------------------------------


class _Look(NamedTuple):
    """Size of the image that is cropped, the picture as a data URI, and why there is none."""

    size: Size | None
    picture: str | None
    fault: str = ""


def _look_at(item: Item, settings: Dataset, readers: Readers) -> _Look:
    """Return a small picture of an item; of a video one frame, of one at a URL none."""
    from latentmake.reports.page import embedded

    if is_remote(item.image):
        return _Look(None, None)
    try:
        size, image = _opened(item, settings, readers)
    except SourceError as error:
        return _Look(None, None, error.what)
    except OSError as error:
        return _Look(None, None, f"cannot be read ({error.strerror})")
    image.thumbnail((_SIDE, _SIDE))
    return _Look(size, embedded(image, "webp", quality=75))


def _opened(item: Item, settings: Dataset, readers: Readers) -> tuple[Size, Image.Image]:
    from PIL import Image

    from latentmake.caches.pixels.plain import decode, shrink_to, upright_size
    from latentmake.files.video import frame_of

    path = Path(item.image)
    if path.suffix.lower() in {*VIDEO_EXTENSIONS, NPZ}:
        (frame,) = readers.each(item.image, frame_of, item.image, (item.span or Span()).first)
        image = Image.fromarray(frame)
        if item.media is not None and item.media.rotation:
            image = image.rotate(-item.media.rotation, expand=True)
        return Size(*image.size), image
    if item.media is not None:  # a layout whose names have it takes images as they are stored
        settings = settings.model_copy(update={"exif_rotation": False})
    data = path.read_bytes()
    size = upright_size(data, item.image, settings)
    shrink = shrink_to(size, Size(2 * _SIDE, 2 * _SIDE))
    return size, decode(data, item.image, settings, shrink=shrink)


def _crop(layout: Layout, resolution: str, size: Size | None, settings: Dataset) -> dict[str, Any]:
    """Return what a resolution keeps of an image: words, and shares of its width and height."""
    asked = parsed(resolution).size
    if size is None or asked is None:
        return {"words": resolution, "crop": None}
    try:
        found = layout.place(size, asked, settings)
    except SourceError as error:
        return {"words": f"{resolution}: {error.what}", "crop": None}
    words = f"{resolution} → {found.target.width} × {found.target.height}"
    return {"words": words, "crop": _shares(found)}


def _shares(found: Placement) -> list[float]:
    (width, height), left, top, target = found
    right, bottom = left + target.width, top + target.height
    shares = (left / width, top / height, right / width, bottom / height)
    return [round(min(share, 1.0), 3) for share in shares]
