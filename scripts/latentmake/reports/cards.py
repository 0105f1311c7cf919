"""Cards of a run's items for a page: a picture with its crops, every text with its tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.errors import SourceError
from latentmake.files.media import NPZ, VIDEO_EXTENSIONS, upright_size
from latentmake.files.readers import Readers
from latentmake.files.workspace import is_remote, usable_cores
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.progress import Progress
from latentmake.reports.captions import Card, Cards
from latentmake.reports.page import embedded

if TYPE_CHECKING:
    from PIL import Image

PICTURES = 500
"""Cards with a picture on a page."""
_SIDE = 192  # pixels of a picture


def page_data(facts: Facts, name: str, found: Cards) -> dict[str, Any]:
    """Return what a page shows of cards of a run, as JSON values; other sections are empty."""
    run, datasets = facts.config.runs[name], facts.config.datasets
    titles = {x: f"{x} (regularisation)" if datasets[x].is_reg else x for x in run.datasets}

    def values(numbered: tuple[int, Card]) -> dict[str, Any]:
        number, card = numbered
        shown = number < PICTURES
        size, picture, fault = _look_at(facts, card, readers) if shown else (None, None, "")
        crops = [_crop(facts, name, card, each.name, size) for each in run.resolutions]
        return {
            "dataset": titles.get(card.dataset, card.dataset),
            "stem": card.item.stem,
            "path": card.item.image,
            "size": "" if size is None else f"{size.width} × {size.height}",
            "picture": picture,
            "fault": card.fault or fault,
            "texts": [[text.split, [seen[:2] for seen in text.seen]] for text in card.texts],
            "targets": crops if shown else [],
        }

    with Readers() as readers, ThreadPoolExecutor(usable_cores()) as pool:
        made = pool.map(values, enumerate(found.cards))
        bar = Progress(made, desc=f"images of {name}", unit="image", total=len(found.cards))
        items = [*bar]
    return {
        "facts": [["Run", name], ["Model", run.model], ["Datasets", ", ".join(titles.values())]],
        "encoders": found.encoders(),
        "faults": found.faults,
        "notes": found.notes,
        "items": items,
        "tables": [],
        "training": None,
    }


def _look_at(facts: Facts, card: Card, readers: Readers) -> tuple[Size | None, str | None, str]:
    """Return the size of an item, a small picture as a data URI, and why there is none.

    The picture of a video is a frame; an item at a URL has none.
    """
    if is_remote(card.item.image):
        return None, None, ""
    try:
        size, image = _opened(facts, card, readers)
    except SourceError as error:
        return None, None, error.what
    except OSError as error:
        return None, None, f"cannot be read ({error.strerror})"
    image.thumbnail((_SIDE, _SIDE))
    return size, embedded(image, "webp", quality=75), ""


def _opened(facts: Facts, card: Card, readers: Readers) -> tuple[Size, Image.Image]:
    from PIL import Image

    from latentmake.caches.pixels.plain import decode, shrink_to
    from latentmake.files.video import frame_of

    item, settings = card.item, facts.config.datasets[card.dataset]
    path = Path(item.image)
    if path.suffix.lower() in {*VIDEO_EXTENSIONS, NPZ}:
        first = item.span.first if item.span else 0
        (frame,) = readers.each(item.image, frame_of, item.image, first)
        image = Image.fromarray(frame)
        if item.media is not None and item.media.rotation:
            image = image.rotate(-item.media.rotation, expand=True)
        return Size(*image.size), image
    if item.media is not None:  # a layout whose names have it takes images as they are stored
        settings = settings.model_copy(update={"exif_rotation": False})
    data = path.read_bytes()
    turns, limit = settings.exif_rotation, settings.max_image_pixels
    size = upright_size(data, item.image, limit, turns=turns)
    shrink = shrink_to(size, Size(2 * _SIDE, 2 * _SIDE))
    return size, decode(data, item.image, settings, shrink=shrink)


def _crop(facts: Facts, run: str, card: Card, resolution: str, size: Size | None) -> dict[str, Any]:
    """Return what a resolution keeps of an image: words, and shares of its width and height."""
    asked = parsed(resolution).size
    if size is None or asked is None:
        return {"words": resolution, "crop": None}
    layout, settings = facts.layout(facts.config.runs[run].model), facts.config.datasets
    try:
        resized, left, top, target = layout.place(size, asked, settings[card.dataset])
    except SourceError as error:
        return {"words": f"{resolution}: {error.what}", "crop": None}
    ends = (left, top, left + target.width, top + target.height)
    shares = [round(min(end / side, 1.0), 3) for end, side in zip(ends, 2 * resized, strict=True)]
    return {"words": f"{resolution} → {target.width} × {target.height}", "crop": shares}
