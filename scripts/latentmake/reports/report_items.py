"""Items of a run's report: thumbnails with their crops, decoded latents, tokens, near-duplicates.

Bounded whatever the number of items: at most 10,000 are shown, of which a few are decoded, and all
takes less than 8.5 MB as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latentmake import layouts
from latentmake.errors import SourceError
from latentmake.files.cores import usable_cores
from latentmake.files.media import NPZ, VIDEO_EXTENSIONS
from latentmake.geometry.buckets import Placement, Size
from latentmake.layouts import Layout
from latentmake.models import tokenizers as tokens
from latentmake.progress import Progress
from latentmake.reports.captions import summary, texts_of, token_counter
from latentmake.reports.contact_sheet import ACROSS, ContactSheets, Look, look_at
from latentmake.reports.decoded_latents import Decoder
from latentmake.reports.items_order import ItemsOrder, Shown, spread
from latentmake.reports.near_duplicates import Fingerprint, alike, fingerprint

__all__ = ["items_section"]

_PIXELS = 1024 * 1024
_DECODED = {True: 4 * _PIXELS, False: 64 * _PIXELS}  # pixels at most; whether on the CPU
_MANY = 1000  # items; of more, fewer are decoded
_PICTURES, _FEW = 24, 8  # items at most whose latents are decoded
_TEXT, _LONGEST = 600_000, 2000  # characters of all captions, and of one
_REST, _LONGEST_REST = 300_000, 300  # characters of all that is cut off, and of one text
_ALIKE = 10_000  # near-duplicates in all, and 8 of an item at most

Row = dict[str, Any]


def items_section(order: ItemsOrder, say: Callable[[str], object]) -> dict[str, Any]:
    """Return the items of a report as JSON values; `say` receives what is left out.

    Returns:
        items: of each `dataset`, `stem`, `path`, `width`, `height`, `caption`, `thumbnail`
            ([sheet, left, top, width, height] in pixels, or None), `targets`, `tokens` (encoder ->
            [number, limit]), `like` ([dataset, stem, different bits]); where there is any `fault`
            and `cut` (encoder -> text that it does not see). A target has `resolution`, `size`,
            `crop` ([left, top, right, bottom] as shares of the image); where it was decoded
            `decoded` and `original` (data URIs) and `psnr` in dB, else `note` says why not.
        sheets: data URIs of the thumbnails.
        skipped: items that the run leaves out, and why.
        encoders: lengths of the texts, of each text encoder.
        notes: what is left out.
        total: number of the run's items.
    """
    notes = []
    if len(order.items) < order.total:
        notes.append(f"{len(order.items)} of {order.total} items are shown, spread evenly")
    rows: list[Row] = [_row(item) for item in order.items]
    skipped = [each._asdict() for each in order.skipped]
    sheets = _look(order, rows)
    encoders = _count_tokens(order, rows, notes)
    _decode(order, rows, notes)
    for line in notes:
        say(line)
    return {
        "items": rows,
        "sheets": sheets,
        "skipped": skipped,
        "encoders": encoders,
        "notes": notes,
        "total": order.total,
    }


def _row(item: Shown) -> Row:
    return {
        "stem": item.stem,
        "dataset": item.dataset,
        "path": item.image,
        "width": None,
        "height": None,
        "caption": "",
        "thumbnail": None,
        "targets": [{"resolution": name, "size": None, "crop": None} for name, _ in item.targets],
        "tokens": {},
        "like": [],
    }


# -- images ---------------------------------------------------------------------------------------


def _look(order: ItemsOrder, rows: list[Row]) -> list[str]:
    """Fill in what is seen of the images; return their contact sheets."""
    sheets = ContactSheets(len(rows))
    layout = layouts.of(order.model.layout_name)
    prints: list[Fingerprint | None] = []

    def look(item: Shown) -> tuple[Look, Fingerprint | None]:
        found = look_at(item, order.datasets[item.dataset], sheets.side)
        return found, None if found.image is None else fingerprint(found.image)

    bar = Progress(total=len(rows), desc=f"images of {order.run}", unit="image")
    with bar, ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(rows), ACROSS**2):
            items = order.items[start : start + ACROSS**2]
            looks = []
            for found, print_ in pool.map(look, items):
                looks.append(found)
                prints.append(print_)
                bar.update()
            places = sheets.add([each.image for each in looks])
            for row, item, seen, place in zip(rows[start:], items, looks, places, strict=False):
                row["thumbnail"] = place
                if seen.fault:
                    row["fault"] = seen.fault
                if seen.size is not None:
                    row["width"], row["height"] = seen.size
                    _crop(order, layout, item, seen.size, row["targets"])
    listed = max(1, min(8, _ALIKE // max(1, len(rows))))
    for number, others in alike(prints, listed).items():
        rows[number]["like"] = [
            [rows[other]["dataset"], rows[other]["stem"], bits] for other, bits in others
        ]
    return sheets.sheets


def _crop(order: ItemsOrder, layout: Layout, item: Shown, size: Size, targets: list[Row]) -> None:
    for target in targets:
        resolution = layouts.size_of(target["resolution"])
        assert resolution is not None
        try:
            found = layout.placement(resolution, size, order.datasets[item.dataset])
        except SourceError as error:
            target["note"] = error.what
            continue
        target["size"], target["crop"] = found.target, _shares(found)


def _shares(found: Placement) -> list[float]:
    (width, height), left, top, target = found
    right, bottom = left + target.width, top + target.height
    shares = (left / width, top / height, right / width, bottom / height)
    return [round(min(share, 1.0), 3) for share in shares]


# -- captions -------------------------------------------------------------------------------------


def _count_tokens(order: ItemsOrder, rows: list[Row], notes: list[str]) -> list[Row]:
    """Fill in captions and tokens, those of an item's longest text; return each encoder's sums."""
    limits, see, note = token_counter(order.model)
    if note:
        notes.append(note)
    text_limit = max(60, min(_LONGEST, _TEXT // max(1, len(rows))))
    rest_limit = max(20, min(_LONGEST_REST, _REST // max(1, len(rows))))
    all_seen: list[list[tokens.Cut]] = [[] for _ in limits]
    for item, row in zip(order.items, rows, strict=True):
        try:
            texts = texts_of(item.caption, item.texts)
        except SourceError as error:
            row["fault"] = str(error)
            continue
        row["caption"] = _shortened(texts[0], text_limit)
        seen = [see(text) for text in texts]
        for limit, several, sums in zip(limits, zip(*seen, strict=True), all_seen, strict=True):
            sums.extend(several)
            longest = max(several, key=lambda each: each.tokens)
            row["tokens"][limit.encoder] = [longest.tokens, limit.tokens]
            if longest.kept < longest.tokens:
                row.setdefault("cut", {})[limit.encoder] = _shortened(longest.rest, rest_limit)
    return [summary(limit, seen) for limit, seen in zip(limits, all_seen, strict=True)]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# -- latents --------------------------------------------------------------------------------------


def _decode(order: ItemsOrder, rows: list[Row], notes: list[str]) -> None:
    """Fill in the decoded latents of a few items that have some, spread evenly."""
    decoder = Decoder(order.model_name, order.model)
    if decoder.fault:
        notes.append(decoder.fault)
        return
    numbers = [
        number
        for number, (row, item) in enumerate(zip(rows, order.items, strict=True))
        if row["thumbnail"]
        and not _is_video(item)
        and any(Path(x).exists() for _, x in item.targets)
    ]
    each = max((sum(map(_area, rows[number]["targets"])) for number in numbers), default=1)
    pictures = _PICTURES if len(rows) <= _MANY else _FEW
    chosen = spread(numbers, max(1, min(pictures, _DECODED[decoder.on_cpu] // max(1, each))))
    for number in Progress(chosen, desc=f"latents of {order.run}", unit="item"):
        item = order.items[number]
        settings, recipe = order.datasets[item.dataset], order.recipes[item.dataset]
        for target, (resolution, path) in zip(rows[number]["targets"], item.targets, strict=True):
            shown = decoder.show(item, resolution, path, settings, recipe)
            target |= {key: value for key, value in shown._asdict().items() if value}
    decoded = sum(any("decoded" in target for target in row["targets"]) for row in rows)
    if decoded < len(rows):
        notes.append(f"latents of {decoded} of {len(rows)} items are decoded")


def _area(target: Row) -> int:
    width, height = target["size"] or (0, 0)
    return int(width * height)


def _is_video(item: Shown) -> bool:
    return Path(item.image).suffix.lower() in {*VIDEO_EXTENSIONS, NPZ}
