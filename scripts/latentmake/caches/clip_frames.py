"""Frames of several clips of one video, read in one pass and scaled as before encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.caches.pixels.wan import fit
from latentmake.files.frames import frames_at
from latentmake.geometry.buckets import Size


class Wanted(NamedTuple):
    """One clip of a file.

    Attributes:
        indices: of its frames in the file, ascending; one may occur several times.
        size: of its frames, in pixels.
    """

    indices: Sequence[int]
    size: Size


class Frame(NamedTuple):
    """One frame of a clip.

    Attributes:
        clip: number of the clip among those wanted.
        times: how often the clip has it, in a row.
        pixels: [height, width, 3], 0 to 255.
    """

    clip: int
    times: int
    pixels: NDArray[np.uint8]


def clip_frames(
    path: str, wanted: Sequence[Wanted], *, rotation: int, max_pixels: int
) -> Iterator[Frame]:
    """Yield the frames of some clips of a file in the file's order; each is decoded once.

    Args:
        path: of a video, or of an .npz clip.
        wanted: the clips.
        rotation: degrees clockwise by which frames are turned first.
        max_pixels: most pixels of a scaled frame before it is cut, see `fit`.

    Raises:
        SourceError: the file is damaged, gone, or ends before the last frame.
    """
    users: dict[int, dict[int, int]] = {}
    for number, clip in enumerate(wanted):
        for index in clip.indices:
            counts = users.setdefault(index, {})
            counts[number] = counts.get(number, 0) + 1
    for index, frame in frames_at(path, sorted(users)):
        turned = np.rot90(frame, -rotation // 90) if rotation else frame
        made: dict[Size, NDArray[np.uint8]] = {}
        for number, times in users[index].items():
            size = wanted[number].size
            if size not in made:
                made[size] = fit(turned, size, path=path, max_pixels=max_pixels)
            yield Frame(number, times, made[size])


def clip_array(path: str, wanted: Wanted, *, rotation: int, max_pixels: int) -> NDArray[np.uint8]:
    """Return one clip, [frames, height, width, 3]; errors are those of `clip_frames`."""
    width, height = wanted.size
    clip = np.empty((len(wanted.indices), height, width, 3), np.uint8)
    row = 0
    for frame in clip_frames(path, [wanted], rotation=rotation, max_pixels=max_pixels):
        clip[row : row + frame.times] = frame.pixels
        row += frame.times
    return clip
