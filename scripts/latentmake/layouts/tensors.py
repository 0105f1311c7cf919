"""Names of tensors in cache files, and the metadata that trainers read of them."""

from __future__ import annotations

from collections.abc import Sequence

from latentmake import digest
from latentmake.config.architectures import ARCHITECTURES, ArchitectureName
from latentmake.config.models import Model
from latentmake.files.cachefile import CAPTION, ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import AnyClip


def plain_latents_metadata(
    scaling: float, shift: float, original: tuple[int, int], pixels: tuple[int, int]
) -> dict[str, str]:
    """Return the metadata of a latents file.

    A network expects (latents - shift) * scaling. `original` is the size of the upright image,
    `pixels` that of the encoded one (width, height).
    """
    return {
        "scaling_factor": repr(scaling),
        "shift_factor": repr(shift),
        ORIGINAL_WIDTH: str(original[0]),
        ORIGINAL_HEIGHT: str(original[1]),
        "pixel_width": str(pixels[0]),
        "pixel_height": str(pixels[1]),
    }


def hidden_state(index: int) -> str:
    """Return the name of the tensor of a text encoder's last hidden state."""
    return f"{encoder_name(index)}.hidden_state"


def encoder_name(index: int) -> str:
    """Return a text encoder's name as in a diffusers pipeline: text_encoder, text_encoder_2, ..."""
    return "text_encoder" if index == 0 else f"text_encoder_{index + 1}"


LATENTS = "latents"
_VERSION = "1.0.1"


def latents_key(kind: str, shape: Sequence[int], dtype: str) -> str:
    """Return the name of a tensor of latents [C, F, h, w]: `latents_1x32x48_bfloat16`.

    `kind` is `latents`, `latents_image` or `latents_control`.
    """
    return f"{kind}_{'x'.join(map(str, shape[1:]))}_{dtype}"


def musubi_latents_metadata(width: int, height: int, frames: int | None) -> dict[str, str]:
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
    side = max((scripts.rounded.get(each, 1) for each in model.latents_arguments), default=1)
    width, height = (-(-length // side) * side // scripts.pixels for length in size)
    return frames, f"{height}x{width}"


def array_name(kind: str, architecture: ArchitectureName, height: int, width: int) -> str:
    """Return the name of an array in a file of latents: `latents_64x96`, or `latents` alone.

    SD 3, Flux and later ones may have several resolutions in one file. Height and width are those
    of the latents; `kind` is `latents`, `latents_flipped`, `original_size`, `crop_ltrb` or
    `alpha_mask`.
    """
    return f"{kind}_{height}x{width}" if ARCHITECTURES[architecture].sized_arrays else kind
