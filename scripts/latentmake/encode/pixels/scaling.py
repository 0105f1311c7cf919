"""Scaling of pictures and frames as in sd-scripts and musubi-tuner, and cutting of clips.

All clips of a video are cut in all of their sizes while the file is read once. Scaled frames are
kept while a later clip needs them, so each frame is decoded and scaled once. Processes that read
videos import this module, so it imports neither the configuration nor the plan.
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

from latentmake.encode.pixels import Array
from latentmake.formats.video import EndedError, read_frames
from latentmake.geometry import buckets
from latentmake.geometry.buckets import Placement, Size

MAX_PIXELS = 178_956_970  # Pillow's own limit for a decompression bomb

cv2.setNumThreads(1)  # files are already read in parallel


def fit(pixels: Array, placed: Placement) -> Array:
    """Scale and crop an image: by OpenCV's area averaging if no side grows, else by Lanczos."""
    height, width = pixels.shape[:2]
    resized, left, top, target = placed
    if (width, height) != resized:
        if width >= resized.width and height >= resized.height:
            pixels = np.asarray(cv2.resize(pixels, resized, interpolation=cv2.INTER_AREA), np.uint8)
        else:
            pixels = np.array(Image.fromarray(pixels).resize(resized, Image.Resampling.LANCZOS))
    return np.ascontiguousarray(pixels[top : top + target.height, left : left + target.width])


def cover(
    image: Image.Image | Array, target: Size, *, path: str = "", max_pixels: int = MAX_PIXELS
) -> Array:
    """Scale an image to cover its target size, and crop it around its centre.

    When Lanczos scales an image up, alpha affects the colours. It is dropped at the end.

    Returns:
        [height, width, 3], contiguous, a copy.

    Raises:
        SourceError: the image is so narrow that scaling would give more than `max_pixels`.
    """
    pixels = np.array(image) if isinstance(image, Image.Image) else image
    size = Size(pixels.shape[1], pixels.shape[0])
    placement = buckets.cover(size, target, max_pixels, path)
    # If the size fits already, `fit` may have returned a view of the image.
    copies = True if placement.resized == size else None
    return np.array(fit(pixels, placement)[:, :, :3], order="C", copy=copies)


Key = tuple[Size, Size]
"""Size of a clip's frames (a bucket), and the resolution that the bucket belongs to."""


class Film(NamedTuple):
    """A video or npz clip.

    Attributes:
        path: path of the file.
        rotation: degrees by which frames are rotated clockwise before scaling.
        max_pixels: largest number of pixels of a scaled frame before it is cropped, see `cover`.
        bucket: step of the buckets of a control, whose own bucket follows from the shape of its
            first frame; 0: its own bucket is the resolution. None for a video.
    """

    path: str
    rotation: int = 0
    max_pixels: int = MAX_PIXELS
    bucket: int | None = None

    def scaled(self, frame: Array, key: Key, shape: Size | None) -> Array:
        """Scale a frame. Frames of a control, which has a `shape`, are scaled twice.

        As in musubi-tuner, they are scaled to the control's own bucket, then to the clip's.
        """
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
        kept: ascending indices in the file of all frames that the item uses; an index may repeat.
        start: position of the clip's first frame in `kept`.
        frames: number of the clip's frames.
        keys: sizes and resolutions that the frames are scaled to.
    """

    kept: Sequence[int]
    start: int
    frames: int
    keys: Sequence[Key]

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the clip's frames in the file."""
        return self.kept[self.start : self.start + self.frames]

    @property
    def reach(self) -> tuple[int, int]:
        """Indices of the first and the last frame in the file; cuts are sorted by them."""
        return self.kept[self.start], self.kept[self.start + self.frames - 1]


def cut(film: Film, cuts: Sequence[Cut]) -> Iterator[dict[Key, Array] | None]:
    """Yield a clip for each cut: key -> [frames, height, width, 3]. None is a sign of life.

    If a control ends early, the last frame that its item uses is repeated.

    Args:
        film: the file.
        cuts: clips in the order of their `reach`.

    Raises:
        SourceError: the file is damaged or gone, ends too early, or its frames are too narrow.
    """
    left, first = deque(cuts), None if film.bucket is None else cuts[0].kept[0]
    try:
        yield from _clips(film, left, first)
    except EndedError as error:
        if first is None:
            raise
        yield from _clips(film, deque(_repeating(rest, error.frames) for rest in left), first)


def _repeating(clip: Cut, end: int) -> Cut:
    """Repeat the last frame that the item uses before the file's end, if there is one."""
    place = bisect_left(clip.kept, end)
    if not place:
        return clip
    indices = [min(index, clip.kept[place - 1]) for index in clip.indices]
    return Cut(indices, 0, clip.frames, clip.keys)


def _clips(film: Film, left: deque[Cut], first: int | None) -> Iterator[dict[Key, Array] | None]:
    """Yield the clips and remove them from `left`. Frame `first` decides on a control's shape."""
    keys = dict.fromkeys(key for rest in left for key in rest.keys)
    wanted, shape = {index for rest in left for index in rest.indices}, None
    if first is not None:
        wanted.add(first)
    frames = read_frames(film.path, sorted(wanted))
    # The smallest first frame of the last clip, of the last two, ...: earlier frames can be freed.
    firsts = [*accumulate((rest.reach[0] for rest in reversed(left)), min)]
    scaled: dict[int, dict[Key, Array]] = {}  # index -> frame in all sizes
    while left:
        current, following = left[0], firsts[len(left) - 2] if len(left) > 1 else sys.maxsize
        clips = {
            key: np.empty((current.frames, key[0].height, key[0].width, 3), np.uint8)
            for key in current.keys
        }
        for row, index in enumerate(current.indices):
            while index not in scaled:
                number, frame = next(frames)
                if frame is None:
                    yield None
                    continue
                if number == first:
                    shape = Size(frame.shape[1], frame.shape[0])
                least = min(index, following)
                scaled = {at: sizes for at, sizes in scaled.items() if at >= least}
                scaled[number] = {key: film.scaled(frame, key, shape) for key in keys}
            for key, clip in clips.items():
                clip[row] = scaled[index][key]
        scaled = {at: sizes for at, sizes in scaled.items() if at >= following}
        left.popleft()
        yield clips
        del clips  # otherwise they would stay in memory while the next clips are filled
