"""Layout of musubi-tuner, for Wan and each other architecture of its.

    cache/{dataset}/{model}/{resolution}/{base}_{W}x{H}_wan.safetensors                      images
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}_{W}x{H}_wan.safetensors     clips
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}-{section}_{W}x{H}_fp.safetensors
    cache/{dataset}/{model}/{resolution}/{base}_wan_te.safetensors                           text
    cache/{dataset}/{model}/text.1@{resolution}/{base}_wan_te.safetensors            another text

`wan` is the suffix of the architecture. Caches of a resolution lie flat in one folder, a
`cache_directory` of musubi-tuner, with the text in each. W x H is an image's own size, and a clip's
bucket. Names, tensors and metadata are those of musubi-tuner 0.3.4 (dataset/image_video_dataset.py
and cache_io.py there).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from latentmake import digest
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.spec import Architecture
from latentmake.files.cachefile import CAPTION
from latentmake.geometry.buckets import Placement, Size, control_size, place, wan_size
from latentmake.geometry.clips import AnyClip, Clip, Media, Section, Span, clips, sections
from latentmake.layouts.layout import DROPPED, Layout, Named, kind_of, size_of

_CLIP = re.compile(r"(.+)_\d{5,}-\d{3,}")
_SECTION = re.compile(r"(.+)_\d{5,}-\d{3,}-\d{4,}")
_VERSION = "1.0.1"


class Musubi(Layout):
    """The layout of one of its architectures."""

    encoding = "wan"
    adopts = True
    drops_skipped = True
    numbers_variants = True
    text_ending: str

    def __init__(self, architecture: Architecture) -> None:
        assert architecture.scripts is not None
        suffix = architecture.scripts.suffix
        # Wan's is as old as the layout, and a model of it has no `architecture`.
        self.name = f"musubi-{architecture.name}" if architecture is not WAN else "musubi"
        self.step = architecture.side
        # Our encoders take one control, and need none for text.
        self.numbered_controls = not architecture.encodes
        self.controlled_text = not architecture.encodes and architecture.scripts.text.reads_controls
        self.rate = architecture.scripts.fps
        self.sections = architecture.scripts.sections
        self.text_ending = f"_{suffix}_te.safetensors"
        self.latents_ending = f"_{suffix}.safetensors"
        section = "-0000" * self.sections
        self.longest_ending = f"_00000-000{section}_00000x00000{self.latents_ending}"

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return each resolution, and the texts of each: `text@512`, `text.1@512`."""
        names = list(resolutions)
        return [*names, *(f"{text}@{name}" for text in texts for name in names)]

    def base(self, stem: str) -> str:
        """Return an item's name without its sub-folders: cache files lie flat."""
        return stem.rpartition("/")[2]

    def named(
        self,
        folder: str,
        part: str,
        stem: str,
        media: Media | None,
        settings: Dataset | None,
        span: Span | None = None,
    ) -> Sequence[Named]:
        """Return the targets of one item: its text, an image's latents, or those of each clip."""
        stem = self.base(stem)
        if kind_of(part) == "text" or settings is None or not settings.video:
            return super().named(folder, part, stem, media, settings)
        assert media is not None
        resolution = size_of(part)
        assert resolution is not None
        bucket = settings.fit == "bucket"
        image = Size(media.width, media.height)
        size = wan_size(image, resolution, bucket=bucket, no_upscale=False, step=self.step)
        shape = f"{size.width:04d}x{size.height:04d}"
        return [
            Named(f"{folder}/{stem}_{_place(x)}_{shape}{self.latents_ending}", x)
            for clip in self.clips(media, settings, span)
            for x in self._files(clip, settings)
        ]

    def _files(self, clip: Clip, settings: Dataset) -> Sequence[AnyClip]:
        """Return what the files of a clip hold: all of it, or a section each."""
        if not self.sections:
            return (clip,)
        count = sections(clip.frames, settings.fp_latent_window_size)
        return [Section(*clip, number) for number in range(count)]

    def clips(self, media: Media, settings: Dataset, span: Span | None = None) -> list[Clip]:
        """Return the clips that are made of a video, or of a span of it.

        Of clips in sections those with at least one.
        """
        found = self._clips(media, settings, span)
        if not self.sections:
            return found
        window = settings.fp_latent_window_size
        return [clip for clip in found if sections(clip.frames, window) > 0]

    def _clips(self, media: Media, settings: Dataset, span: Span | None) -> list[Clip]:
        return clips(
            media.frames,
            target_frames=settings.target_frames or [],
            frame_extraction=settings.frame_extraction,
            frame_stride=settings.frame_stride,
            frame_sample=settings.frame_sample,
            max_frames=settings.max_frames,
            source_fps=settings.source_fps,
            span=span or Span(),
            timing=media.timing,
            rate=self.rate,
        )

    def placement(self, resolution: Size, image: Size, settings: Dataset) -> Placement:
        """Return how an image or a frame, as stored, is brought to its size."""
        return place(image, self._size(image, resolution, settings))

    def _resizing(
        self, resolution: Size, image: Size, settings: Dataset, clip: AnyClip | None, span: Span
    ) -> str:
        """Return the size that pictures are resized to, and a clip's frames.

        Where each frame of a file is kept, a clip's first frame is that of the file, so that equal
        clips of different spans have the same key.
        A control video is first resized to a bucket of its own, which depends on the resolution.
        """
        size = self._size(image, resolution, settings)
        name = f"{size.width}x{size.height}"
        if clip is None:
            return name
        controlled = f"@{resolution.width}x{resolution.height}" * bool(settings.control_directory)
        start, first = clip.start, span.first
        if settings.source_fps is None:
            start, first = first + start * span.stride, 0
        thinned = f"x{span.stride}" * (span.stride > 1) + f"+{first}" * (first > 0)
        section = f"#{clip.number}" if isinstance(clip, Section) else ""
        return f"{name}:{start}-{clip.frames}{section}{thinned}{controlled}"

    def variant(
        self,
        resolution: Size | None,
        image: Size,
        settings: Dataset | None,
        clip: AnyClip | None,
        span: Span | None = None,
        rotation: int = 0,
        controls: Sequence[Size] = (),
    ) -> str:
        """Return the part of a target's key; it tells control images of another size than usual."""
        found = super().variant(resolution, image, settings, clip, span, rotation)
        if not controls or resolution is None or settings is None:
            return found
        sizes = self._control_sizes(resolution, image, settings, controls)
        usual = self._control_sizes(resolution, image, settings)
        return found if {*sizes} == {*usual} else f"{found}+{_names(sizes)}"

    def text_variant(
        self,
        resolution: Size | None,
        image: Size,
        settings: Dataset | None,
        controls: Sequence[Size] = (),
    ) -> str:
        """Return the sizes that the control images of a text are brought to; one if all are equal.

        musubi-tuner's scripts bring them to these before they are resized for a text encoder.
        """
        if resolution is None or settings is None:
            return ""
        sizes = self._control_sizes(resolution, image, settings, controls)
        return f"controls:{_names(sizes if len({*sizes}) > 1 else sizes[:1])}"

    def _control_sizes(
        self, resolution: Size, image: Size, settings: Dataset, controls: Sequence[Size] = ()
    ) -> list[Size]:
        """Return the size that each control image is brought to; without theirs, the usual one."""
        if controls:
            return [control_size(each, settings, self.step) for each in controls]
        return [self._size(image, resolution, settings)]

    def _size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image or a frame is brought to."""
        bucket, no_upscale = settings.fit == "bucket", settings.bucket_no_upscale
        return wan_size(image, resolution, bucket=bucket, no_upscale=no_upscale, step=self.step)

    def owners(self, name: str) -> Sequence[str]:
        """Return the bases that a file of a folder may belong to: as text, image or clip."""
        found = super().owners(name)
        if not found or name.endswith(self.text_ending):
            return found
        clip = (_SECTION if self.sections else _CLIP).fullmatch(found[0])
        return (*found, clip[1]) if clip else found

    def identity(self, stem: str, path: str) -> str:
        """Return the file's name: an item may have several clips."""
        return path.rpartition("/")[2]

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """Return `latents` (resolution -> paths) and `text` (resolution -> path).

        Where there are several texts, `variants` (resolution -> paths of all of them) and `dropped`
        (resolution -> path of the empty caption) too.
        """
        texts: dict[str, dict[str, str]] = {}
        for part, paths in targets.items():
            if kind_of(part) == "text":
                name, _, resolution = part.partition("@")
                texts.setdefault(name, {})[resolution] = paths[0]
        latents = {part: list(paths) for part, paths in targets.items() if kind_of(part) != "text"}
        row: dict[str, object] = {"latents": latents, "text": texts.get("text", {})}
        if DROPPED in texts:
            row["dropped"] = texts.pop(DROPPED)
        if len(texts) > 1:
            row["variants"] = {
                resolution: [paths[resolution] for paths in texts.values()]
                for resolution in texts["text"]
            }
        return row

    def caption(self, text: str) -> str:
        """Return a caption with newlines as Python's text mode reads them."""
        return text.replace("\r\n", "\n").replace("\r", "\n")


def _names(sizes: Iterable[Size]) -> str:
    return "+".join(f"{size.width}x{size.height}" for size in sizes)


def _place(clip: AnyClip) -> str:
    """Return the part of a file's name for a clip or a section of one."""
    section = f"-{clip.number:04d}" if isinstance(clip, Section) else ""
    return f"{clip.start:05d}-{clip.frames:03d}{section}"


LAYOUTS = tuple(Musubi(each) for each in (WAN, *ARCHITECTURES.values()) if each.scripts is not None)
"""The layout of each architecture."""


def latents_key(kind: str, shape: Sequence[int], dtype: str) -> str:
    """Return the name of a tensor of latents [C, F, h, w]: `latents_1x32x48_bfloat16`.

    `kind` is `latents`, `latents_image` or `latents_control`.
    """
    return f"{kind}_{'x'.join(map(str, shape[1:]))}_{dtype}"


def latents_metadata(width: int, height: int, frames: int | None) -> dict[str, str]:
    """Return the metadata of a latents file: the size in its name, and the frames of a clip."""
    metadata = {
        "architecture": "wan",
        "width": str(width),
        "height": str(height),
        "format_version": _VERSION,
    }
    return metadata if frames is None else {**metadata, "frame_count": str(frames)}


def text_metadata(caption: str) -> dict[str, str]:
    """Return the metadata of a text file: musubi-tuner's keys, and the caption's digest.

    musubi-tuner keeps our key when it writes another caption into the file; the digest shows it.
    """
    return {
        "architecture": "wan",
        "caption1": caption,
        "format_version": _VERSION,
        CAPTION: digest.of_bytes(caption.encode()),
    }


# -- latents as names of tensors have them --------------------------------------------------------


def frames_and_sides(
    model: Model, settings: Dataset, media: Media, resolution: Size, clip: AnyClip | None
) -> tuple[str, str]:
    """Return the frames and the sides of an item's latents, as names of tensors have them.

    Returns:
        A pattern of the number of frames, and `{height}x{width}`.
    """
    scripts = model.spec.scripts
    assert scripts is not None
    size = wan_size(
        Size(media.width, media.height),
        resolution,
        bucket=settings.fit == "bucket",
        no_upscale=settings.bucket_no_upscale,
        step=model.spec.side,
    )
    frames = str(1 if clip is None else (clip.frames - 1) // scripts.frames + 1)
    if scripts.sections or scripts.layers:
        frames = "[0-9]+"  # as many as a section has, or an item layers
    width, height = latents_size(model, size)
    return frames, f"{height}x{width}"


def latents_size(model: Model, size: Size) -> Size:
    """Return the width and height of the latents of a picture that was brought to a size."""
    scripts = model.spec.scripts
    assert scripts is not None
    side = max((scripts.rounded.get(each, 1) for each in model.latents_arguments), default=1)
    width, height = (-(-length // side) * side // scripts.pixels for length in size)
    return Size(width, height)
