"""From the bytes of an image or a video to the pixels that Wan's VAE sees.

Exactly those that musubi-tuner hands to it, oddities included, so that its trainer cannot tell our
caches from its own: no EXIF rotation, two ways of scaling, transparency that is left out unseen.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import cv2
import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray
from PIL import Image

from latentmake.errors import SourceError
from latentmake.files.media import opened_image, opened_video
from latentmake.geometry.buckets import Size, place, refuse_narrow, wan_size
from latentmake.geometry.clips import Clip, time_indices

__all__ = ["fit", "open_image", "read_clips", "read_control"]

Key = TypeVar("Key", bound=Hashable)

MAX_PIXELS = 178_956_970  # Pillow's own measure of a decompression bomb

cv2.setNumThreads(1)  # files are read side by side already


def open_image(data: bytes, path: str, max_pixels: int) -> Image.Image:
    """Decode an image to RGB or RGBA, as stored: no EXIF rotation.

    Whatever else it is, Pillow converts it to RGB: 16-bit greyscale is cut off at 255 by that, and
    the transparency of a palette is lost.

    Args:
        data: the file's bytes.
        path: names it in errors.
        max_pixels: an image of more is refused.

    Raises:
        SourceError: it is empty, no image, cut short, or has too many pixels.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        image.load()
        return image if image.mode in ("RGB", "RGBA") else image.convert("RGB")


def fit(
    image: Image.Image | NDArray[np.uint8],
    target: Size,
    *,
    path: str = "",
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Bring an image to its target size: scaled to cover it, centre kept, without transparency.

    It is scaled up with Pillow's Lanczos and down with OpenCV's area averaging; alpha takes part
    in the former and is dropped at the end.

    Args:
        image: RGB or RGBA, or pixels [height, width, 3 or 4].
        target: in pixels.
        path: names it in errors.
        max_pixels: scaled to more than these and more than it has, it is refused.

    Returns:
        Pixels [height, width, 3], 0 to 255, in one piece.

    Raises:
        SourceError: it is so narrow that it would first have to be scaled up beyond all measure.
    """
    if isinstance(image, Image.Image):
        size = Size(*image.size)
    else:
        size = Size(image.shape[1], image.shape[0])
    placement = place(size, target)
    refuse_narrow(size, placement, max_pixels, path)
    if size == target:
        pixels = np.array(image)
    elif target.width > size.width or target.height > size.height:
        picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
        pixels = np.array(picture.resize(placement.resized, Image.Resampling.LANCZOS))
    else:
        pixels = np.asarray(
            cv2.resize(np.array(image), placement.resized, interpolation=cv2.INTER_AREA)
        )
    rows = slice(placement.top, placement.top + target.height)
    columns = slice(placement.left, placement.left + target.width)
    return np.ascontiguousarray(pixels[rows, columns, :3], dtype=np.uint8)


def read_clips(
    data: bytes,
    path: str,
    source_fps: float | None,
    wanted: Sequence[tuple[Size, Clip]],
    *,
    max_pixels: int = MAX_PIXELS,
) -> list[NDArray[np.uint8]]:
    """Decode a video once, up to the last frame that is needed, and cut clips out of it.

    Args:
        data: the file's bytes.
        path: names it in errors.
        source_fps: frame rate of the file; None keeps each frame.
        wanted: for each clip the size it is brought to, and its place among the frames kept.
        max_pixels: as for `fit`, of each frame.

    Returns:
        For each clip its pixels [frames, height, width, 3], 0 to 255. Clips of one size that
        overlap share memory: do not write to them.

    Raises:
        SourceError: it is empty, no video, damaged as far as that, or has fewer frames.
    """
    if not wanted:
        return []
    pictures = _pictures(data, path, source_fps, _positions(wanted), repeat_last=False)
    return _cut(
        pictures,
        wanted,
        lambda picture, size: fit(picture, size, path=path, max_pixels=max_pixels),
    )


def read_control(
    data: bytes,
    path: str,
    source_fps: float | None,
    wanted: Sequence[tuple[Size, Size, Clip]],
    *,
    max_pixels: int = MAX_PIXELS,
) -> list[NDArray[np.uint8]]:
    """Decode a video that controls another, and cut the same clips out of it.

    Where it is shorter, its last frame is repeated. musubi-tuner scales its frames twice: to the
    bucket that is nearest to the shape of the control video itself, then to the other's bucket.

    Args:
        data: the file's bytes.
        path: names it in errors.
        source_fps: frame rate of both files; None keeps each frame.
        wanted: for each clip the resolution asked for, the size of the clip that it controls, and
            that clip's place.
        max_pixels: as for `fit`, of each frame.

    Returns:
        As `read_clips`.

    Raises:
        SourceError: it is empty, no video, or damaged as far as that.
    """
    if not wanted:
        return []
    keyed = [((resolution, target), clip) for resolution, target, clip in wanted]
    positions = sorted({0, *_positions(keyed)})
    pictures = _pictures(data, path, source_fps, positions, repeat_last=True)
    beginning = next(pictures)
    shape = Size(*beginning[1].size)

    def scaled(picture: Image.Image, key: tuple[Size, Size]) -> NDArray[np.uint8]:
        resolution, target = key
        own = wan_size(shape, resolution, bucket=True, no_upscale=False)
        first = fit(picture, own, path=path, max_pixels=max_pixels)
        return fit(first, target, path=path, max_pixels=max_pixels)

    return _cut(chain([beginning], pictures), keyed, scaled)


def _positions(wanted: Sequence[tuple[Key, Clip]]) -> list[int]:
    found: set[int] = set()
    for _, clip in wanted:
        found.update(range(clip.start, clip.start + clip.frames))
    return sorted(found)


def _pictures(
    data: bytes,
    path: str,
    source_fps: float | None,
    positions: Sequence[int],
    *,
    repeat_last: bool,
) -> Iterator[tuple[int, Image.Image]]:
    """Yield the pictures at some rising positions among the kept frames, as they are decoded."""
    pending = deque(positions)
    previous = position = -1
    last: VideoFrame | None = None
    with opened_video(io.BytesIO(data), path) as (container, _):
        decoded = container.decode(video=0)
        for index, (frame, time) in enumerate(zip(decoded, time_indices(source_fps), strict=False)):
            if frame.is_corrupt:  # FFmpeg goes on, with what it guesses
                raise SourceError(
                    f"is damaged at frame {index}",
                    where=path,
                    mend="convert it anew, replace or remove it",
                )
            if time == previous:
                continue
            previous, position, last = time, position + 1, frame
            if position == pending[0]:
                yield pending.popleft(), _picture(frame)
                if not pending:
                    return
        if last is None or not repeat_last:
            raise SourceError(
                f"ends after {position + 1} frames, but its clips need {positions[-1] + 1}",
                where=path,
                mend="convert it anew, replace or remove it",
            )
        picture = _picture(last)
        for rest in pending:
            yield rest, picture


def _picture(frame: Any) -> Image.Image:
    picture: Image.Image = frame.to_image()
    return picture


def _cut(
    pictures: Iterable[tuple[int, Image.Image]],
    wanted: Sequence[tuple[Key, Clip]],
    scaled: Callable[[Image.Image, Key], NDArray[np.uint8]],
) -> list[NDArray[np.uint8]]:
    """Scale each picture for each key that needs it, as it comes, and cut clips out of those."""
    rows: dict[Key, dict[int, int]] = {}
    for key in dict.fromkeys(key for key, _ in wanted):
        needed = _positions([each for each in wanted if each[0] == key])
        rows[key] = {position: row for row, position in enumerate(needed)}
    stacks: dict[Key, NDArray[np.uint8]] = {}
    for position, picture in pictures:
        for key, places in rows.items():
            if position in places:
                pixels = scaled(picture, key)
                if key not in stacks:
                    stacks[key] = np.empty((len(places), *pixels.shape), np.uint8)
                stacks[key][places[position]] = pixels
    clips = []
    for key, clip in wanted:
        first = rows[key][clip.start]  # a clip's frames follow each other, here too
        clips.append(stacks[key][first : first + clip.frames])
    return clips
