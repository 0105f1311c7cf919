"""Estimates of caches before they are made: bytes on the disk, and minutes where jobs have run.

Sizes come from shapes and dtypes and are exact for latents of Wan; a caption's length in tokens is
guessed from its bytes. Nothing is decoded, and no network is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from latentmake.config.models import Model
from latentmake.errors import SourceError
from latentmake.files.cachefile import BYTES, size_of, stamp
from latentmake.files.disk import Need, human
from latentmake.geometry import sdscripts_buckets
from latentmake.geometry.buckets import Size, target_size, wan_size
from latentmake.index.memo import Memo
from latentmake.layouts import musubi, plain
from latentmake.models.flops import latents_flops, text_flops
from latentmake.models.shapes import Latents, latents_shape, text_width
from latentmake.models.weight_kinds import content_of, weight_file
from latentmake.plan.amounts import (
    BYTES_A_TOKEN,
    caption_bytes,
    caption_tokens,
    fact_of,
    order_amount,
)
from latentmake.plan.batches import minutes_of
from latentmake.plan.jobs import EncodingJob
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.parts import Plan
from latentmake.plan.targets import kinds_built
from latentmake.plan.training_estimate import duration, guessed

_FORMATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DIGEST = "0" * 64
_WAN = (16, 8, 4)  # channels, pixels a side and frames of a latent
_CONDITION_CHANNELS = 20  # of image-to-video
_CLIP_VISION = ("F16", (257, 1280))  # ViT-H/14: tokens and width
_UMT5_WIDTH, _UMT5_BYTES = 4096, 1 << 30  # umT5-XXL, whose single file is larger than that
_EMBEDDINGS = ("token_embedding.weight", "shared.weight")
_ARRAY = 256  # bytes of an npz archive for an array, besides its numbers

Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]


@dataclass
class CacheEstimate:
    """Files to be encoded by the jobs of one kind and model.

    Attributes:
        kind: `latents` or `text`.
        count: files to be encoded; equal captions may make it fewer.
        size: their bytes; those of unknown shape are left out.
        unknown: number of these.
        measured: whether some bytes are those of files that past jobs wrote.
        minutes: expected; None where no job of the kind and model has run here.
        work: floating-point operations; None where nobody knows.
        shapes: (frames, height, width) of clips or images -> number.
    """

    kind: str
    model: str
    count: int = 0
    size: int = 0
    unknown: int = 0
    measured: bool = False
    minutes: float | None = 0.0
    work: float | None = 0.0
    shapes: Counter[Shape] = field(default_factory=Counter)

    def add(self, other: CacheEstimate) -> None:
        """Add another of the same kind and model."""
        self.count += other.count
        self.size += other.size
        self.unknown += other.unknown
        self.measured |= other.measured
        known = self.minutes is not None and other.minutes is not None
        self.minutes = (self.minutes or 0.0) + (other.minutes or 0.0) if known else None
        worked = self.work is not None and other.work is not None
        self.work = (self.work or 0.0) + (other.work or 0.0) if worked else None
        self.shapes += other.shapes

    @property
    def is_known(self) -> bool:
        """Whether it says anything."""
        return self.unknown < self.count or self.minutes is not None or self.work is not None

    @property
    def line(self) -> str:
        """The estimate in a line."""
        about = "about " * (self.kind == "text" or self.measured)
        amount = "size unknown" if self.unknown == self.count else f"{about}{human(self.size)}"
        time = guessed(self.work)
        if self.minutes is not None:
            time = f"about {duration(self.minutes)} at the rate measured here"
        return f"{self.kind} of {self.model}: {self._what}, {amount}; {time}"

    @property
    def _what(self) -> str:
        if self.kind == "text":
            return _several(self.count, "caption")
        clips = sum(number for shape, number in self.shapes.items() if shape[0] > 1)
        counts = {"clip": clips, "image": self.count - clips}
        nouns = " and ".join(_several(number, noun) for noun, number in counts.items() if number)
        largest = max(self.shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
        shape = " x ".join(map(str, largest if largest[0] > 1 else largest[1:]))
        return f"{nouns} of {'up to ' * (len(self.shapes) > 1)}{shape}"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


class Estimates:
    """Estimates of a plan's jobs.

    Args:
        memo: knows the speed of past jobs.
        jobs: of the plan.
    """

    def __init__(self, memo: Memo, jobs: Iterable[EncodingJob]) -> None:
        self._found = {
            order.name: _estimate(memo, order, starts=not number)
            for job in jobs
            for number, order in enumerate(job.orders)
            if not order.reuses
        }

    def lines(self) -> list[str]:
        """Return a line for each kind and model of which anything is known."""
        return [each.line for each in self._merged(self._found) if each.is_known]

    def needs(self, orders: Iterable[WorkOrder]) -> list[Need]:
        """Return the room that some of the jobs need."""
        names = dict.fromkeys(order.name for order in orders if order.name in self._found)
        return [
            Need(f"{each.kind} of {each.model}", "cache", each.size) for each in self._merged(names)
        ]

    def _merged(self, names: Iterable[str]) -> list[CacheEstimate]:
        together: dict[tuple[str, str], CacheEstimate] = {}
        for each in map(self._found.__getitem__, names):
            empty = CacheEstimate(each.kind, each.model)
            together.setdefault((each.kind, each.model), empty).add(each)
        return list(together.values())


def built_orders(plan: Plan, targets: Sequence[str]) -> list[WorkOrder]:
    """Return the orders of a plan that a build of some targets carries out, none twice."""
    named = {target for target in targets if target.startswith("cache/")}
    found = {
        order.name: order
        for name, run in plan.runs.items()
        for order in run.orders
        if order.kind in kinds_built(name, targets) or not named.isdisjoint(order.paths)
    }
    return [*found.values()]


def estimates_by_part(
    memo: Memo, orders: Iterable[WorkOrder]
) -> dict[tuple[str, str, str], CacheEstimate]:
    """Return (dataset, model, part) -> estimate of its targets, without the start of jobs."""
    found: dict[tuple[str, str, str], CacheEstimate] = {}
    for order in orders:
        if order.reuses:
            continue
        for part in dict.fromkeys(target.part for item in order.items for target in item.targets):
            own = ((x, tuple(t for t in x.targets if t.part == part)) for x in order.items)
            items = tuple(item._replace(targets=targets) for item, targets in own if targets)
            place = order.dataset, order.model, part
            empty = CacheEstimate(order.kind, order.model)
            estimate = _estimate(memo, replace(order, items=items), starts=False)
            found.setdefault(place, empty).add(estimate)
    return found


def _estimate(memo: Memo, order: WorkOrder, *, starts: bool) -> CacheEstimate:
    minutes = minutes_of(memo, order, starts=starts)
    found = CacheEstimate(order.kind, order.model, minutes=minutes)
    (_add_text if order.kind == "text" else _add_latents)(order, found)
    rate = memo.rate(order.work) if found.unknown else None
    if rate is not None and (each := rate.size(len(order.paths), order_amount(order))):
        found.size += round(each * found.unknown / len(order.paths))
        found.unknown, found.measured = 0, True
    return found


# -- latents --------------------------------------------------------------------------------------


def _add_latents(order: WorkOrder, estimate: CacheEstimate) -> None:
    model, settings = order.model_settings, order.dataset_settings
    sizes = _wan_bytes(order) if model.spec.video else _image_bytes(order)
    if _by_foreign_scripts(model):
        sizes = _unknown_bytes
    flops, encoded = latents_flops(model), 0
    for item in order.items:
        for target in item.targets:
            if target.at_hand:
                continue
            pixels = _pixels(order, item, target)
            frames = target.clip.frames if target.clip else 1
            named = pixels
            if not settings.video and item.media is not None:
                named = Size(item.media.width, item.media.height)
            size = sizes(pixels, frames, named)
            encoded += frames * pixels.width * pixels.height
            estimate.count += 1
            estimate.shapes[frames, pixels.height, pixels.width] += 1
            estimate.size += size or 0
            estimate.unknown += size is None
    estimate.work = None if flops is None else flops * encoded


def _by_foreign_scripts(model: Model) -> bool:
    """Whether musubi-tuner's scripts make the caches of a model, in shapes of their own."""
    return model.spec.scripts is not None and not model.spec.encodes


def _unknown_bytes(pixels: Size, frames: int, named: Size) -> None:
    return None


def _pixels(order: WorkOrder, item: WorkItem, target: Target) -> Size:
    """Return the size that an image or a clip is brought to; its resolution where nobody knows."""
    model, settings, resolution = order.model_settings, order.dataset_settings, target.size
    assert resolution is not None
    if item.media is None:
        return resolution
    image = Size(item.media.width, item.media.height)
    if model.spec.scripts is not None:
        bucket, no_upscale = settings.fit == "bucket", settings.bucket_no_upscale
        step = model.spec.side
        return wan_size(image, resolution, bucket=bucket, no_upscale=no_upscale, step=step)
    if order.layout.npz and model.architecture is not None:
        try:
            found = sdscripts_buckets.placement(image, resolution, settings, model.architecture)
        except SourceError:  # which the job names
            return resolution
        return found.target
    return target_size(image, resolution, fit=settings.fit, step=settings.bucket_steps)


_Sizes = Callable[[Size, int, Size], int | None]
"""Returns the bytes of a file of latents, from size and frames encoded and the size it names."""


def _wan_bytes(order: WorkOrder) -> _Sizes:
    model, settings = order.model_settings, order.dataset_settings
    name = model.vae_dtype or model.dtype
    dtype, stamps = _FORMATS[name], _stamp(order)
    channels, side, times = _WAN
    kinds = {"latents": channels}
    if model.image_to_video:
        kinds["latents_image"] = _CONDITION_CHANNELS
    if settings.control_directory is not None:
        kinds["latents_control"] = channels

    @cache
    def size(pixels: Size, frames: int, named: Size) -> int:
        shape = ((frames - 1) // times + 1, pixels.height // side, pixels.width // side)
        tensors: Tensors = {
            musubi.latents_key(kind, (count, *shape), name): (dtype, (count, *shape))
            for kind, count in kinds.items()
        }
        if model.clip is not None:
            tensors[f"clip_{name}"] = _CLIP_VISION
        length = frames if settings.video else None
        return size_of(tensors, musubi.latents_metadata(*named, length) | stamps)

    return size


def _image_bytes(order: WorkOrder) -> _Sizes:
    model, settings = order.model_settings, order.dataset_settings
    known, stamps = fact_of(latents_shape, model.vae), _stamp(order)
    dtype, strategies = _FORMATS[model.vae_dtype or model.dtype], model.spec.strategies
    if strategies is not None and strategies.channels:  # arrays of sd-scripts' own, in float32
        known, dtype = Latents(strategies.channels, strategies.pixels, 1.0, 0.0), "F32"

    @cache
    def size(pixels: Size, frames: int, named: Size) -> int | None:
        if known is None:
            return None
        shape = (known.channels, pixels.height // known.factor, pixels.width // known.factor)
        if order.layout.npz:  # numpy has no bfloat16
            number = shape[0] * shape[1] * shape[2] * (1 + settings.flip_aug)
            mask = pixels.width * pixels.height * settings.alpha_mask
            arrays = 3 + settings.flip_aug + settings.alpha_mask
            each = BYTES["F32" if dtype == "BF16" else dtype]
            return each * number + 4 * mask + arrays * _ARRAY + len(json.dumps(stamps))
        metadata = plain.latents_metadata(known.scaling, known.shift, named, pixels)
        return size_of({plain.LATENTS: (dtype, shape)}, metadata | stamps)

    return size


def _stamp(order: WorkOrder) -> dict[str, str]:
    return stamp(key=_DIGEST, source=_DIGEST, recipe=order.recipe)


# -- text -----------------------------------------------------------------------------------------


def _add_text(order: WorkOrder, estimate: CacheEstimate) -> None:
    items = [item for item in order.items if not all(target.at_hand for target in item.targets)]
    if not items:
        return
    widths = [
        _width(order.model_settings, number) for number in range(len(order.model_settings.text))
    ]
    # A text beside each resolution is one file with several names, unless it reads controls.
    count = sum(len({each.size for each in x.targets if not each.at_hand}) for x in items)
    estimate.count += count
    length, flops = caption_bytes(items), text_flops(order.model_settings)
    estimate.work = None if flops is None else flops * count * (length / BYTES_A_TOKEN + 1)
    strategies = order.model_settings.spec.strategies
    if strategies is not None and strategies.caption:
        estimate.size += count * strategies.caption
        return
    if None in widths or _by_foreign_scripts(order.model_settings):
        estimate.unknown += count
        return
    each = size_of(_text_tensors(order, [width or 0 for width in widths], length), _stamp(order))
    estimate.size += round(count * (each + 2 * length))


def _text_tensors(order: WorkOrder, widths: Sequence[int], length: float) -> Tensors:
    model = order.model_settings
    name = model.caption_dtype
    dtype = "F32" if order.layout.npz and name == "bfloat16" else _FORMATS[name]
    found: Tensors = {}
    counts = caption_tokens(model, length)
    for number, (count, width) in enumerate(zip(counts, widths, strict=True)):
        found[plain.hidden_state(number)] = (dtype, (count, width))
    return found


def _width(model: Model, number: int) -> int | None:
    """Return the width of a text encoder's embeddings; None where nobody knows."""
    place = model.text[number]
    width = fact_of(text_width, place)
    if width is not None or not model.spec.original_files or place.path is None:
        return width
    try:  # umT5's single file; one of torch tells no shapes without being read
        path = Path(place.path)
        for name, tensor in content_of(weight_file(path)).tensors.items():
            if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2:
                return tensor.shape[1]
        return _UMT5_WIDTH if path.stat().st_size >= _UMT5_BYTES else None
    except (OSError, ValueError):
        return None
