"""Amount of work in items, by which jobs of one model are compared: pixels or tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from latentmake import layouts
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import ModelError
from latentmake.models.shapes import T5_LENGTH, text_tokens
from latentmake.plan.orders import WorkItem, WorkOrder

BYTES_A_TOKEN = 4  # of English, about
_SAMPLED = 256  # captions that stand for all of a job

_Place = TypeVar("_Place")
_Fact = TypeVar("_Fact")


def order_amount(order: WorkOrder) -> float:
    """Return the amount of work in all targets of an order."""
    return amount_of(order.kind, order.dataset_settings, order.model_settings, order.items)


def amount_of(kind: str, dataset: Dataset, model: Model, items: Sequence[WorkItem]) -> float:
    """Return pixels x frames of the images or clips of all targets, or tokens of their captions.

    Images count as large as their resolution, or as they are where they are not scaled up.
    """
    if kind == "text":
        tokens = sum(caption_tokens(model, caption_bytes(items))) if items else 0
        return float(tokens * sum(len(item.targets) for item in items))
    total = 0
    for item in items:
        most = None
        if dataset.bucket_no_upscale and item.media is not None:
            most = item.media.width * item.media.height
        for target in item.targets:
            if target.size is None:
                continue
            pixels = target.size.width * target.size.height
            pixels = pixels if most is None else min(pixels, most)
            total += pixels * (target.clip.frames if target.clip else 1)
    return float(total)


def caption_tokens(model: Model, length: float) -> list[int]:
    """Return how many tokens of a caption of some bytes each text encoder of a model gets."""
    counts = []
    for place in model.text:
        tokens = fact_of(text_tokens, place)
        count = min(round(length / BYTES_A_TOKEN) + 1, place.max_length or T5_LENGTH)
        if tokens is not None and (tokens.padded or layouts.of(model.layout_name).pads_t5):
            count = tokens.longest
        counts.append(count)
    return counts


def caption_bytes(items: Sequence[WorkItem]) -> float:
    """Return the mean length of captions, from some of them."""
    sample = items[:: -(-len(items) // _SAMPLED)]
    total = 0
    for item in sample:
        if item.text is not None:
            total += len(item.text.encode())
        elif item.source is not None:
            try:
                total += Path(item.source).stat().st_size
            except OSError:
                continue  # on S3, or gone
    return total / len(sample)


def fact_of(find: Callable[[_Place], _Fact | None], place: _Place) -> _Fact | None:
    """Return a fact about a network; None where its configuration, which the job names, is bad."""
    try:
        return find(place)
    except ModelError:
        return None
