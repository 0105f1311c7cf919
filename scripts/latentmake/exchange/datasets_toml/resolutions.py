"""Resolutions of a dataset file, brought to those that a run here may have.

Sides are multiples of a step here. With buckets the area alone counts: another resolution may have
the very same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count

from latentmake.config import Dataset
from latentmake.config.architectures import Architecture
from latentmake.config.fields import MAX_SIDE
from latentmake.exchange.datasets_toml.reader import Reader
from latentmake.exchange.datasets_toml.sdscripts import RESOLUTION
from latentmake.exchange.datasets_toml.sections import Block
from latentmake.geometry import buckets, sdscripts_buckets
from latentmake.geometry.buckets import Size

__all__ = ["fit"]

_USUAL = 1024  # pixels; sd-scripts' documentation has it for all but Stable Diffusion 1 and 2
_SMALL = 512
_TRIED = 40  # steps around the root of the area


def fit(blocks: Sequence[Block], spec: Architecture, reader: Reader) -> None:
    """Replace the resolutions of blocks that cannot be those of a run; note what changes."""
    for block in blocks:
        if block.resolution == RESOLUTION:
            side = _USUAL if spec.caches_text else _SMALL
            what = f"is missing, and sd-scripts takes --resolution; {side} is used here"
            reader.note(f"{block.where}.resolution", what, "correct it in the YAML")
            block.resolution = (side, side)
        width, height = block.resolution
        if width % spec.side == 0 and height % spec.side == 0:
            continue
        asked = Size(width, height)
        sizes = _sizes_of(block, spec)
        same = None if sizes is None else _same(asked, spec.side, sizes)
        size = same or Size(*(max(x // spec.side, 1) * spec.side for x in asked))
        what = f"{width} x {height}: sides are multiples of {spec.side} here; "
        hint = "correct it in the YAML, and encode anew"
        if same is not None:
            what += f"{size.width} x {size.height} has the very same buckets"
            hint = "nothing is to be done"
        else:
            what += f"{size.width} x {size.height} is used, whose latents are of other sizes"
        reader.note(f"{block.where}.resolution", what, hint)
        block.resolution = (size.width, size.height)


def _sizes_of(block: Block, spec: Architecture) -> Callable[[Size], Hashable] | None:
    """Return what gives the buckets of a resolution; None where the resolution itself counts."""
    settings = Dataset.model_validate(block.values)
    if settings.fit != "bucket" or settings.bucket_no_upscale:
        return None
    if spec.scripts is not None:
        return lambda size: buckets.bucket_sizes(size, spec.side, wan=True)
    return lambda size: sdscripts_buckets.bucket_sizes(size, settings.bucketing(spec))


def _same(asked: Size, step: int, sizes: Callable[[Size], Hashable]) -> Size | None:
    try:
        wanted = sizes(asked)
    except ValueError:
        return None
    return next((each for each in _near(asked, step) if sizes(each) == wanted), None)


def _near(asked: Size, step: int) -> Iterator[Size]:
    """Yield resolutions of about the same area, the squarest first."""
    area = asked.width * asked.height
    start = int(area**0.5) // step * step
    for width in count(start, -step):
        if width < max(step, start - _TRIED * step):
            return
        below = area // width // step * step
        for height in (below, below + step):
            if 2 * step <= height <= MAX_SIDE and width >= 2 * step:
                yield Size(width, height)
