"""Bytes of a build's cache files before anything was encoded.

The encoders' files and the items give the shapes of all tensors, see `models.cache_sizes`. The
result is unknown in three cases: the files are not on this disk, the row of the architecture does
not say what its program writes, or captions have no tokenizer or are at a URL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from latentmake.base import digest
from latentmake.base.errors import SourceError, UserError
from latentmake.base.paths import is_remote
from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.data.probe import LOOKED_AT, sizes_of
from latentmake.formats.cachefile import stamp
from latentmake.layouts.layout import kind_of, resolution_of
from latentmake.layouts.names import (
    musubi_latents_metadata,
    plain_latents_metadata,
    text_metadata,
)
from latentmake.models.cache_sizes import file_bytes, latents_tensors, lengths, text_tensors
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Part, Target, placing_of, view_of

_DIGEST = 64 * "0"

Pairs = Sequence[tuple[Item, Target]]
"""Targets, each with its inputs."""


def bytes_of(facts: Facts, part: Part, pairs: Pairs, seen: set[str]) -> float:
    """Return the bytes of some targets of a part; 0 if unknown.

    At most 1,000 images and captions are read, and stand for the others.

    Args:
        facts: facts about the configuration.
        part: the part.
        pairs: its targets.
        seen: captions whose embedding is counted already, because a build links equal ones; it
            gets the captions of these targets.
    """
    sample = pairs[:: -(-len(pairs) // LOOKED_AT) or 1]
    with suppress(UserError, ValueError, LookupError, TypeError):  # other checks report a bad file
        of_kind = {"text": _texts, "latents": _latents}[kind_of(part.name)]
        size = of_kind(facts, part, sample, seen)
        return size * len(pairs) / len(sample)
    return 0.0


def _latents(facts: Facts, part: Part, pairs: Pairs, _seen: Collection[str]) -> float:
    """Return the bytes of latents; raises ValueError if they are unknown."""
    model, settings = facts.config.models[part.model], facts.config.datasets[part.dataset]
    layout, resolution = facts.layout(part.model), resolution_of(part.name)
    assert resolution is not None
    recipe = digest.canonical(facts.recipe(part.dataset, part.model, "latents"))
    sizes, by_view, total = {}, dict[object, float](), 0.0
    if settings.fit == "bucket" or layout.external:
        sizes = sizes_of([item for item, _ in pairs], facts.memo)
    for item, target in pairs:
        image = sizes.get(item.stem, resolution)
        # Layers are stored as frames.
        frames = target.clip.frames if target.clip else 1 + 4 * len(item.layers)
        view_key = image, frames, item.control_sizes, len(item.controls)
        if view_key not in by_view:
            placed = layout.size(image, resolution, settings)
            tensors = latents_tensors(
                model,
                placed,
                frames,
                flips=settings.flip_aug,
                masks=settings.alpha_mask,
                controls=layout.controls(item.control_sizes, settings)
                or [placed] * len(item.controls),
            )
            view, _ = view_of(layout, settings, item, target, image)
            placing = placing_of(layout, settings, item, target, image, view)
            stamped = stamp(key=_DIGEST, source=_DIGEST, recipe=recipe, view=placing)
            metadata = {} if layout.npz else plain_latents_metadata(1.0, 0.0, image, placed)
            if layout.has_frames:
                metadata = musubi_latents_metadata(*image, frames)
            by_view[view_key] = file_bytes(layout, tensors, metadata | stamped)
        total += by_view[view_key]
    return total


def _texts(facts: Facts, part: Part, pairs: Pairs, seen: set[str]) -> float:
    """Return the bytes of embeddings; raises ValueError if they are unknown."""
    if any(is_remote(item.source or "") for item, _ in pairs):
        raise ValueError("its captions are at a URL")
    if any(item.awaits_caption for item, _ in pairs):
        raise ValueError("its captions are not made yet")
    model, layout = facts.config.models[part.model], facts.layout(part.model)
    settings = facts.config.datasets.get(part.dataset)
    contents = Contents((file for item, _ in pairs for file in item.files), facts.memo, settings)
    captions = dict.fromkeys(_readable(contents, pairs))
    new = [caption for caption in captions if f"{part.work} {caption}" not in seen]
    seen.update(f"{part.work} {caption}" for caption in new)
    recipe = digest.canonical(facts.recipe(part.dataset, part.model, "text"))
    same, total = stamp(key=_DIGEST, source=_DIGEST, recipe=recipe), 0.0
    for caption, tokens in zip(new, lengths(model, new), strict=True):
        metadata = {} if layout.npz else {"caption": caption}
        if layout.has_frames:
            metadata = text_metadata(caption)
        total += file_bytes(layout, text_tensors(model, tokens), metadata | same)
    return total


def _readable(contents: Contents, pairs: Pairs) -> Iterable[str]:
    for item, _ in pairs:
        with suppress(SourceError):  # the job reports the error
            yield contents.text(item)
