"""Pictures and frames scaled as sd-scripts and musubi-tuner do, and clips cut from a video.

Clips are cut one after the other, in all of their sizes, by one reading: scaled frames that later
clips use too are kept, so that each frame is decoded and scaled once. Processes that read videos
import this, and so neither configuration nor plan.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from latentmake.caches.pixels import Array
from latentmake.files.video import EndedError, read_frames
from latentmake.geometry import buckets
from latentmake.geometry.buckets import Placement, Size

MAX_PIXELS = 178_956_970  # Pillow's own limit for a decompression bomb

cv2.setNumThreads(1)  # files are read in parallel already


def fit(pixels: Array, found: Placement) -> Array:
    """Scale and cut an image: by OpenCV's area averaging where no side grows, else by Lanczos."""
    height, width = pixels.shape[:2]
    resized, left, top, target = found
    if (width, height) != resized:
        if width >= resized.width and height >= resized.height:
            pixels = np.asarray(cv2.resize(pixels, resized, interpolation=cv2.INTER_AREA), np.uint8)
        else:
            pixels = np.array(Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS))
    return np.ascontiguousarray(pixels[top : top + target.height, left : left + target.width])


def cover(
    image: Image.Image | Array, target: Size, *, path: str = "", max_pixels: int = MAX_PIXELS
) -> Array:
    """Scale an image to cover its target size and cut it around its centre.

    Alpha takes part in Lanczos' scaling up, and is dropped at the end.

    Returns:
        [height, width, 3], contiguous, a copy.

    Raises:
        SourceError: it is so narrow that it would be scaled up to more than `max_pixels`.
    """
    pixels = np.array(image) if isinstance(image, Image.Image) else image
    size = Size(pixels.shape[1], pixels.shape[0])
    placement = buckets.cover(size, target, max_pixels, path)
    found = fit(pixels, placement)[:, :, :3]
    return np.array(found, order="C") if placement.resized == size else np.ascontiguousarray(found)


Key = tuple[Size, Size]
"""Size of a clip's frames, and the resolution whose bucket it is."""


class Film(NamedTuple):
    """A video or npz clip.

    Attributes:
        path: of the file.
        rotation: degrees clockwise by which frames are turned first.
        max_pixels: most pixels of a scaled frame before it is cut, see `cover`.
        bucket: of a control, step of the buckets among which its own shape, that of its first
            frame, has one; 0 where each has the resolution.
    """

    path: str
    rotation: int = 0
    max_pixels: int = MAX_PIXELS
    bucket: int | None = None

    def scaled(self, frame: Array, key: Key, shape: Size | None) -> Array:
        """Scale a frame; that of a control of some shape twice, as musubi-tuner does."""
        size, resolution = key
        if self.rotation:
            frame = np.rot90(frame, -self.rotation // 90)
        if shape is not None:
            own = resolution
            if step := self.bucket:
                widths = buckets.widths(resolution, step, step)
                own = buckets.nearest_bucket(shape, resolution, widths)
            frame = cover(frame, own, path=self.path, max_pixels=self.max_pixels)
        return cover(frame, size, path=self.path, max_pixels=self.max_pixels)


class Cut(NamedTuple):
    """One clip of a file.

    Attributes:
        kept: indices in the file of all frames that its item uses, none smaller than the one
            before.
        start: its first frame, counted among these.
        frames: its length.
        keys: what its frames are scaled for.
    """

    kept: Sequence[int]
    start: int
    frames: int
    keys: Sequence[Key]

    @property
    def indices(self) -> Sequence[int]:
        """Indices in the file of its frames."""
        return self.kept[self.start : self.start + self.frames]

    @property
    def reach(self) -> tuple[int, int]:
        """Indices in the file of its first and last frames, by which cuts are put in order."""
        return self.kept[self.start], self.kept[self.start + self.frames - 1]


def cut(film: Film, cuts: Sequence[Cut]) -> Iterator[dict[Key, Array] | None]:
    """Yield clips, [frames, height, width, 3] for each key; None is a sign of life.

    Of a control that ends early the last frame that its item uses is repeated.

    Args:
        film: the file.
        cuts: clips in the order of their `reach`.

    Raises:
        SourceError: the file is damaged or gone, ends before, or its frames are too narrow.
    """
    left, first = deque(cuts), None if film.bucket is None else cuts[0].kept[0]
    try:
        yield from _clips(film, left, first)
    except EndedError as error:
        if first is None:
            raise
        yield from _clips(film, deque(_repeating(each, error.frames) for each in left), first)


def _repeating(each: Cut, end: int) -> Cut:
    """Repeat the last frame before the end that its item uses, if there is one."""
    place = bisect_left(each.kept, end)
    if not place:
        return each
    indices = [min(index, each.kept[place - 1]) for index in each.indices]
    return Cut(indices, 0, each.frames, each.keys)


def _clips(film: Film, left: deque[Cut], first: int | None) -> Iterator[dict[Key, Array] | None]:
    """Yield clips and take them from `left`; a control has the shape of its frame `first`."""
    keys = dict.fromkeys(key for each in left for key in each.keys)
    wanted, shape = {index for each in left for index in each.indices}, None
    wanted |= set() if first is None else {first}
    frames = read_frames(film.path, sorted(wanted))
    firsts = [*accumulate((each.reach[0] for each in reversed(left)), min)]  # of all that follow
    at_hand: dict[int, dict[Key, Array]] = {}  # scaled frames
    while left:
        each, following = left[0], firsts[len(left) - 2] if len(left) > 1 else sys.maxsize
        clips = {
            key: np.empty((each.frames, key[0].height, key[0].width, 3), np.uint8)
            for key in each.keys
        }
        for row, index in enumerate(each.indices):
            while index not in at_hand:
                number, frame = next(frames)
                if frame is None:
                    yield None
                    continue
                if number == first:
                    shape = Size(frame.shape[1], frame.shape[0])
                least = min(index, following)
                at_hand = {at: made for at, made in at_hand.items() if at >= least}
                at_hand[number] = {key: film.scaled(frame, key, shape) for key in keys}
            for key, clip in clips.items():
                clip[row] = at_hand[index][key]
        at_hand = {at: made for at, made in at_hand.items() if at >= following}
        left.popleft()
        yield clips
        del clips
