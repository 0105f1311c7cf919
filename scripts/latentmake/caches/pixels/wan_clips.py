"""Clips of a video for Wan's VAE, made one after the other, with those of its control video."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from latentmake.caches.inputs import Clips, FramesAt, Sample, stored_size
from latentmake.caches.pixels.cutting import Array, Cut, Cutter
from latentmake.caches.pixels.wan import fit, fitted_sizes
from latentmake.data.item import Item
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Span, kept_indices
from latentmake.plan.orders import Order
from latentmake.plan.target import Target

Key = TypeVar("Key", bound=Hashable)
_Bucket = tuple[Size, Size]  # resolution, and size of the controlled clip


class _Place(NamedTuple):
    """One clip of one item, in all of its sizes."""

    item: Item
    digest: str
    kept: Sequence[int]
    clip: Clip
    targets: list[tuple[Target, str]]

    def cut(self, keys: Iterable[Key]) -> Cut[Key]:
        return Cut(self.kept, *self.clip, tuple(dict.fromkeys(keys)))


class ClipMaker:
    """Samples of the clips of one video file, of one or several items.

    Clips come in the order of their frames, all sizes of one at once, from one decoding.

    Args:
        order: of the job.
        wanted: clips of items that have the same source, and the same control if any.
        frames_at: reads frames.
        check: called after the frames of each clip were read; raises a SourceError if they cannot
            be believed.

    Raises:
        SourceError: the video was changed after the build was planned.
    """

    def __init__(
        self,
        order: Order,
        wanted: Iterable[Clips],
        frames_at: FramesAt,
        check: Callable[[], object] = bool,
    ) -> None:
        self._order = order
        self._check = check
        self._frames_at = frames_at
        places = chain.from_iterable(_places(order, each) for each in wanted)
        self._places = deque(sorted(places, key=lambda place: place.cut(()).reach))
        self._limit = order.dataset_settings.max_image_pixels
        item = self._places[0].item
        self._path, self._control_path = item.source or "", next(iter(item.controls), "")
        self._rotation = item.media.rotation if item.media else 0
        cuts = [place.cut(self._sizes(place)) for place in self._places]
        self._cutter = Cutter(self._path, cuts, self._scaled, frames_at)
        self._control: Cutter[_Bucket] | None = None
        if item.controls:
            self._first = self._places[0].kept[0]
            self._shape: Size | None = None
            controls = [place.cut(self._buckets(place)) for place in self._places]
            self._control = Cutter(
                self._control_path, controls, self._scaled_twice, frames_at, repeats_last=True
            )

    def __len__(self) -> int:
        """Return the number of clips yet to be made."""
        return len(self._places)

    @property
    def holds_another(self) -> bool:
        """Whether a clip besides the one made last is in memory, for frames that others share."""
        return self._cutter.holds_another or bool(self._control and self._control.holds_another)

    @property
    def left(self) -> list[Item]:
        """Items with clips yet to be made."""
        return list({place.item.stem: place.item for place in self._places}.values())

    def make(self) -> list[Sample]:
        """Make the next clip: a sample for each of its targets.

        Raises:
            SourceError: the video or its control is damaged, too narrow, or ends before.
        """
        place = self._places[0]
        item, original = place.item, stored_size(place.item)
        made = self._cutter.cut()
        controls: Sequence[Array | None] = [None] * len(place.targets)
        if self._control is not None:
            stacks = self._control.cut()
            controls = [stacks[bucket] for bucket in self._buckets(place)]
        sizes = self._sizes(place)
        self._check()
        self._places.popleft()
        return [
            Sample(key, place.digest, item, made[size], original, control, clip=True)
            for (_, key), size, control in zip(place.targets, sizes, controls, strict=True)
        ]

    def _sizes(self, place: _Place) -> list[Size]:
        size = stored_size(place.item)
        missing = (target for target, _ in place.targets)
        return fitted_sizes(self._order, size, missing, self._path)

    def _scaled(self, frame: Array, size: Size) -> Array:
        turned = np.rot90(frame, -self._rotation // 90) if self._rotation else frame
        return fit(turned, size, path=self._path, max_pixels=self._limit)

    def _buckets(self, place: _Place) -> list[_Bucket]:
        size = stored_size(place.item)
        resolutions = [target.size or size for target, _ in place.targets]
        return list(zip(resolutions, self._sizes(place), strict=True))

    def _scaled_twice(self, frame: Array, bucket: _Bucket) -> Array:
        """Scale a control's frame as musubi-tuner does.

        First to the bucket nearest to the control video's own shape, then to the other's.
        """
        resolution, size = bucket
        if self._shape is None:
            ((_, first),) = self._frames_at(self._control_path, [self._first])
            self._shape = Size(first.shape[1], first.shape[0])
        own = self._order.layout.size(self._shape, resolution, self._order.dataset_settings)
        once = fit(frame, own, path=self._control_path, max_pixels=self._limit)
        return fit(once, size, path=self._control_path, max_pixels=self._limit)


def check(order: Order, item: Item, missing: Iterable[Target], frames_at: FramesAt) -> None:
    """Open a video, and its control if it has one, that another program will decode.

    Raises:
        SourceError: one holds no frame that can be decoded, is too narrow, or was changed.
    """
    found = []
    for path in filter(None, (item.source, *item.controls)):
        ((_, first),) = frames_at(path, [0])
        found.append((first.shape[1], first.shape[0]))
    fitted_sizes(order, stored_size(item, found[0]), missing, item.source or "")


def _places(order: Order, wanted: Clips) -> list[_Place]:
    item, digest, missing = wanted
    if item.media is None:
        stored_size(item)
    assert item.media is not None
    fps, span = order.dataset_settings.source_fps, item.span or Span()
    frames, timing, rate = item.media.frames, item.media.timing, order.layout.rate
    kept = [index for index, _ in kept_indices(frames, fps, span, timing, rate)]
    found: dict[Clip, _Place] = {}
    for target, key in missing.items():
        clip = Clip(*(target.clip or (0, 1))[:2])
        if clip.start + clip.frames > len(kept):
            what = f"has {len(kept)} frames to use, but its clips need {clip.start + clip.frames}"
            raise SourceError(what, where=item.name, hint="run the same command again")
        place = found.setdefault(clip, _Place(item, digest, kept, clip, []))
        place.targets.append((target, key))
    return list(found.values())
