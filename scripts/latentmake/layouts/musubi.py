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
from collections.abc import Sequence

from latentmake import digest
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.models import Model
from latentmake.files.cachefile import CAPTION
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import AnyClip
from latentmake.layouts.layout import Layout

_VERSION = "1.0.1"


class Musubi(Layout):
    """The layout of one of its architectures; "" stands for Wan."""

    encoding = "wan"
    flat = True

    def __init__(self, architecture: str = "") -> None:
        # Wan's is as old as the layout, and a model of it has no `architecture`.
        self.name = f"musubi-{architecture}" if architecture else "musubi"
        spec = ARCHITECTURES[architecture] if architecture else WAN
        scripts = spec.scripts
        assert scripts is not None
        self.bucket_side = spec.side
        # Our encoders take one control, and need none for text.
        self.numbered_controls = not spec.encodes
        self.controlled_text = not spec.encodes and scripts.text.reads_controls
        self.rate = scripts.fps
        self.sections = scripts.sections
        self.text_ending = f"_{scripts.suffix}_te.safetensors"
        self.latents_ending = f"_{scripts.suffix}.safetensors"
        section = "-0000" * self.sections
        self.longest_ending = f"_00000-000{section}_00000x00000{self.latents_ending}"
        self.clip_name = re.compile(r"(.+)_\d{5,}-\d{3,}" + r"-\d{4,}" * self.sections)

    def caption(self, text: str) -> str:
        """Return a caption with newlines as Python's text mode reads them."""
        return text.replace("\r\n", "\n").replace("\r", "\n")


LAYOUT = Musubi


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


def frames_and_sides(model: Model, size: Size, clip: AnyClip | None) -> tuple[str, str]:
    """Return the frames and the sides of an item's latents, as names of tensors have them.

    They are a pattern of the number of frames, and `{height}x{width}`. The image, or each frame of
    the clip, was brought to `size`.
    """
    scripts = model.spec.scripts
    assert scripts is not None
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
