"""Items of orders, as planning makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latentmake.base.digest import SourceStat
from latentmake.data.item import BUCKET, CAPTION, CONTROL, IMAGE, LAYER, File, Item
from latentmake.layouts.layout import layout_of
from latentmake.plan.orders import Target, Work

NO_STAT = SourceStat(0, 0, 0, 0)


def inputs_of(
    stem: str,
    source: str | None,
    text: str | None = None,
    *,
    controls: Sequence[str] = (),
    layers: Sequence[str] = (),
    image: str | None = None,
    stat: SourceStat = NO_STAT,
    **values: Any,
) -> Item:
    """Return the inputs of targets: an image, a video or a caption (`.txt`), or a text."""
    main = CAPTION if source is not None and source.endswith(".txt") else IMAGE
    files = [(main, source), *((CONTROL, x) for x in controls), *((LAYER, x) for x in layers)]
    files.append((BUCKET, image))
    found = tuple(File(role, path, stat) for role, path in files if path is not None)
    return Item(stem, found, None if text is None else [text], **values)


def plain_path(dataset: str, model: str, part: str, stem: str) -> str:
    """Return the path of a target of the plain layout."""
    layout = layout_of("plain")
    ((path, _),) = layout.named(layout.folder(dataset, model, part), part, stem, None, None)
    return path


def work_of(
    stem: str,
    source: str | None,
    text: str | None,
    targets: Sequence[Target],
    controls: Sequence[str] = (),
    content: str | None = None,
    **values: Any,
) -> Work:
    """Return an item of an order with its targets."""
    item = inputs_of(stem, source, text, controls=controls, **values)
    return Work(item, tuple(targets), content)
