"""Pixels as musubi-tuner hands them to Wan's VAE, from the bytes of an image or a video.

Oddities included, so that its trainer cannot tell our caches from its own: no EXIF rotation, two
ways of scaling, transparency dropped unseen.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentmake.caches.inputs import Sample, SourceBytes, stored_size
from latentmake.caches.pixels import sdscripts
from latentmake.errors import SourceError
from latentmake.files.media import opened_image, opened_video
from latentmake.geometry.buckets import Size, place, refuse_narrow, wan_size
from latentmake.geometry.clips import Clip, time_indices
from latentmake.plan.orders import Target, WorkOrder

__all__ = ["fit", "open_image", "read_clips", "read_control", "samples_of"]

Key = TypeVar("Key", bound=Hashable)
Array = NDArray[np.uint8]

MAX_PIXELS = 178_956_970  # Pillow's own limit for a decompression bomb


def samples_of(
    order: WorkOrder, source: SourceBytes, missing: Mapping[Target, str]
) -> list[Sample]:
    """Make the samples of an image or a video, with its control if it has one.

    Raises:
        SourceError: the image or video is damaged, too large, too narrow, or was changed.
    """
    item, data, control, digest = source
    dataset, path, control_path = order.dataset_settings, item.source or "", item.control or ""
    limit, bucket = dataset.max_image_pixels, dataset.fit == "bucket"
    original = stored_size(item)
    resolutions = [target.size or original for target in missing]
    sizes = [
        wan_size(original, each, bucket=bucket, no_upscale=dataset.bucket_no_upscale)
        for each in resolutions
    ]
    controls: Sequence[Array | None] = [None] * len(missing)
    if dataset.video:
        clips = [target.clip or Clip(0, 1) for target in missing]
        fps = None if dataset.source_fps == "auto" else dataset.source_fps
        wanted = list(zip(sizes, clips, strict=True))
        made = read_clips(data, path, fps, wanted, max_pixels=limit)
        if item.control:
            asked = list(zip(resolutions, sizes, clips, strict=True))
            controls = read_control(control, control_path, fps, asked, max_pixels=limit)
    else:
        image = open_image(data, path, limit)
        stored_size(item, image.size)
        made = [fit(image, size, path=path, max_pixels=limit)[None] for size in sizes]
        if item.control:
            image = open_image(control, control_path, limit)
            controls = [
                fit(image, size, path=control_path, max_pixels=limit)[None] for size in sizes
            ]
    return [
        Sample(key, digest, item, pixels, original, other, clip=dataset.video)
        for key, pixels, other in zip(missing.values(), made, controls, strict=True)
    ]


def open_image(data: bytes, path: str, max_pixels: int) -> Image.Image:
    """Decode an image to RGB or RGBA, as stored.

    Pillow converts all other modes to RGB: 16-bit greyscale is cut off at 255 by that, and the
    transparency of a palette is lost.

    Raises:
        SourceError: it is empty, no image, cut short, or too large.
    """
    with opened_image(io.BytesIO(data), path, max_pixels) as image:
        image.load()
        return image if image.mode in ("RGB", "RGBA") else image.convert("RGB")


def fit(
    image: Image.Image | Array, target: Size, *, path: str = "", max_pixels: int = MAX_PIXELS
) -> Array:
    """Scale an image to cover its target size and cut it around its centre.

    Alpha takes part in Lanczos' scaling up, and is dropped at the end.

    Returns:
        [height, width, 3], contiguous.

    Raises:
        SourceError: it is so narrow that it would be scaled up to more than `max_pixels`.
    """
    pixels = np.array(image)
    size = Size(pixels.shape[1], pixels.shape[0])
    placement = place(size, target)
    refuse_narrow(size, placement, max_pixels, path)
    return np.ascontiguousarray(sdscripts.fit(pixels, placement)[:, :, :3])


def read_clips(
    data: bytes,
    path: str,
    source_fps: float | None,
    wanted: Sequence[tuple[Size, Clip]],
    *,
    max_pixels: int = MAX_PIXELS,
) -> list[Array]:
    """Decode a video once, up to the last frame needed, and cut clips from it.

    Args:
        data: the file's bytes.
        path: for messages.
        source_fps: frame rate of the file; None keeps each frame.
        wanted: target size of each clip, and its place among the kept frames.
        max_pixels: of a frame, see `fit`.

    Returns:
        [frames, height, width, 3] for each clip. Overlapping clips of one size share memory.

    Raises:
        SourceError: it is empty, no video, damaged before that frame, or has fewer frames.
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
) -> list[Array]:
    """Decode a control video, and cut the same clips from it as from the controlled one.

    If it is shorter, its last frame is repeated. musubi-tuner scales its frames twice: to the
    bucket nearest to the control video's own shape, then to the other's bucket. `wanted` holds of
    each clip the resolution, the size of the controlled clip, and its place.
    """
    if not wanted:
        return []
    keyed = [((resolution, target), clip) for resolution, target, clip in wanted]
    positions = sorted({0, *_positions(keyed)})
    pictures = _pictures(data, path, source_fps, positions, repeat_last=True)
    first = next(pictures)
    shape = Size(*first[1].size)

    def scaled(picture: Image.Image, key: tuple[Size, Size]) -> Array:
        resolution, target = key
        own = wan_size(shape, resolution, bucket=True, no_upscale=False)
        once = fit(picture, own, path=path, max_pixels=max_pixels)
        return fit(once, target, path=path, max_pixels=max_pixels)

    return _cut(chain([first], pictures), keyed, scaled)


def _positions(wanted: Iterable[tuple[Key, Clip]]) -> list[int]:
    spans = (range(clip.start, clip.start + clip.frames) for _, clip in wanted)
    return sorted(set(chain.from_iterable(spans)))


def _pictures(
    data: bytes,
    path: str,
    source_fps: float | None,
    positions: Sequence[int],
    *,
    repeat_last: bool,
) -> Iterator[tuple[int, Image.Image]]:
    """Yield (position, picture) at ascending positions among the kept frames, while decoding."""
    pending = deque(positions)
    previous = position = -1
    last: Any = None
    with opened_video(io.BytesIO(data), path) as (container, _):
        decoded: Iterator[Any] = container.decode(video=0)  # half typed
        for index, (frame, time) in enumerate(zip(decoded, time_indices(source_fps), strict=False)):
            if frame.is_corrupt:  # FFmpeg goes on with guesses
                raise _damaged(f"is damaged at frame {index}", path)
            if time == previous:
                continue
            previous, position, last = time, position + 1, frame
            if position == pending[0]:
                yield pending.popleft(), frame.to_image()
                if not pending:
                    return
        if last is None or not repeat_last:
            needed = positions[-1] + 1
            raise _damaged(f"ends after {position + 1} frames, but its clips need {needed}", path)
        picture = last.to_image()
        for rest in pending:
            yield rest, picture


def _damaged(what: str, path: str) -> SourceError:
    return SourceError(what, where=path, hint="convert it again, replace or remove it")


def _cut(
    pictures: Iterable[tuple[int, Image.Image]],
    wanted: Sequence[tuple[Key, Clip]],
    scaled: Callable[[Image.Image, Key], Array],
) -> list[Array]:
    """Scale each picture for each key that needs it, and cut clips from the results."""
    rows: dict[Key, dict[int, int]] = {}
    for key in dict.fromkeys(key for key, _ in wanted):
        needed = _positions(each for each in wanted if each[0] == key)
        rows[key] = {position: row for row, position in enumerate(needed)}
    stacks: dict[Key, Array] = {}
    for position, picture in pictures:
        for key, places in rows.items():
            if position in places:
                pixels = scaled(picture, key)
                if key not in stacks:
                    stacks[key] = np.empty((len(places), *pixels.shape), np.uint8)
                stacks[key][places[position]] = pixels
    firsts = [rows[key][clip.start] for key, clip in wanted]  # a clip's frames are neighbours
    return [
        stacks[key][first : first + clip.frames]
        for first, (key, clip) in zip(firsts, wanted, strict=True)
    ]
