"""The layout of musubi-tuner, for Wan 2.1 and 2.2.

    cache/{dataset}/{model}/{resolution}/{base}_{W}x{H}_wan.safetensors                      images
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}_{W}x{H}_wan.safetensors     clips
    cache/{dataset}/{model}/{resolution}/{base}_wan_te.safetensors                           text

All of a resolution lie flat in one folder, which is one `cache_directory` of musubi-tuner, with the
text in every one of them. W x H is an image's own size, and a clip's bucket. Names, tensors and
metadata are those of musubi-tuner 0.3.4 (dataset/image_video_dataset.py and cache_io.py there).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from latentmake import digest
from latentmake.buckets import Size, wan_size
from latentmake.cachefile import CAPTION
from latentmake.clips import Clip, clips
from latentmake.config import Dataset
from latentmake.layouts import Named, size_of
from latentmake.media import Media

__all__ = [
    "LATENTS_ENDING",
    "TEXT_ENDING",
    "base",
    "clips_of",
    "folder",
    "identity",
    "latents_key",
    "latents_metadata",
    "longest_ending",
    "named",
    "owners",
    "parts",
    "row",
    "text_metadata",
    "variant",
]

LATENTS_ENDING = "_wan.safetensors"
TEXT_ENDING = "_wan_te.safetensors"
longest_ending = "_00000-000_00000x00000_wan.safetensors"
_SIZE = re.compile(r"(.+)_\d{4,}x\d{4,}")
_CLIP = re.compile(r"(.+)_\d{5,}-\d{3,}")
_VERSION = "1.0.1"


def parts(resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
    """Return the parts of one dataset and model: each resolution, and the one text beside each."""
    names = list(resolutions)
    return [*names, *(f"text@{name}" for name in names)]


def folder(dataset: str, model: str, part: str) -> str:
    """Return the folder of a resolution, for its latents and its text."""
    return f"cache/{dataset}/{model}/{part.removeprefix('text@')}"


def base(stem: str) -> str:
    """Return an item's name without its sub-folders: cache files lie flat."""
    return stem.rpartition("/")[2]


def clips_of(media: Media, settings: Dataset) -> list[Clip]:
    """Return the clips that are made of a video."""
    return clips(
        media.frames,
        target_frames=settings.target_frames or [],
        frame_extraction=settings.frame_extraction,
        frame_stride=settings.frame_stride,
        frame_sample=settings.frame_sample,
        max_frames=settings.max_frames,
        source_fps=settings.source_fps,
    )


def named(
    folder: str, part: str, stem: str, media: Media | None, settings: Dataset | None
) -> Sequence[Named]:
    """Return the targets of one item: its text, an image's latents, or those of each clip."""
    start = f"{folder}/{base(stem)}"
    if part.startswith("text@"):
        return (Named(f"{start}{TEXT_ENDING}"),)
    assert media is not None
    if settings is None or not settings.video:
        return (Named(f"{start}_{media.width:04d}x{media.height:04d}{LATENTS_ENDING}"),)
    resolution = size_of(part)
    assert resolution is not None
    size = wan_size(Size(media.width, media.height), resolution, bucket=True, no_upscale=False)
    shape = f"{size.width:04d}x{size.height:04d}"
    return [
        Named(f"{start}_{clip.start:05d}-{clip.frames:03d}_{shape}{LATENTS_ENDING}", clip)
        for clip in clips_of(media, settings)
    ]


def variant(
    resolution: Size | None, image: Size, settings: Dataset | None, clip: Clip | None
) -> str:
    """Return the size that pictures are brought to, and a clip's frames; "" for text.

    How they are brought to it follows from their own size. A control video is first brought to a
    bucket of its own, which follows from the resolution.
    """
    if resolution is None or settings is None:
        return ""
    bucket, no_upscale = settings.fit == "bucket", settings.bucket_no_upscale
    size = wan_size(image, resolution, bucket=bucket, no_upscale=no_upscale)
    name = f"{size.width}x{size.height}"
    if clip is None:
        return name
    controlled = f"@{resolution.width}x{resolution.height}" * bool(settings.control_directory)
    return f"{name}:{clip.start}-{clip.frames}{controlled}"


def owners(name: str) -> Sequence[str]:
    """Return the bases that a file of a folder may belong to: as text, image or clip."""
    if name.endswith(TEXT_ENDING):
        return (name[: -len(TEXT_ENDING)],)
    if name.endswith(LATENTS_ENDING) and (size := _SIZE.fullmatch(name[: -len(LATENTS_ENDING)])):
        clip = _CLIP.fullmatch(size[1])
        return (size[1], clip[1]) if clip else (size[1],)
    return ()


def identity(stem: str, path: str) -> str:
    """Return the file's name: an item may have several clips."""
    return path.rpartition("/")[2]


def row(targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return `latents` (resolution -> paths) and `text` (resolution -> path)."""
    return {
        "latents": {part: list(paths) for part, paths in targets.items() if part[:1] != "t"},
        "text": {part[5:]: paths[0] for part, paths in targets.items() if part[:1] == "t"},
    }


def latents_key(kind: str, shape: Sequence[int], dtype: str) -> str:
    """Return the name of a tensor of latents [C, F, h, w]: `latents_1x32x48_bfloat16`.

    Args:
        kind: `latents`, `latents_image` or `latents_control`.
        shape: of the tensor.
        dtype: `bfloat16`, `float16` or `float32`.
    """
    return f"{kind}_{'x'.join(map(str, shape[1:]))}_{dtype}"


def latents_metadata(width: int, height: int, frames: int | None) -> dict[str, str]:
    """Return what a latents file's header says.

    Args:
        width: that of the file's name, in pixels.
        height: likewise.
        frames: of a clip, in pixels' time; None for an image.
    """
    metadata = {
        "architecture": "wan",
        "width": str(width),
        "height": str(height),
        "format_version": _VERSION,
    }
    return metadata if frames is None else {**metadata, "frame_count": str(frames)}


def text_metadata(caption: str) -> dict[str, str]:
    """Return what an embedding's header says: musubi-tuner's keys, and a digest of ours.

    musubi-tuner puts a new caption beside all other metadata of an older file, so that our key
    alone would not tell that it wrote there.
    """
    return {
        "architecture": "wan",
        "caption1": caption,
        "format_version": _VERSION,
        CAPTION: digest.of_bytes(caption.encode()),
    }
