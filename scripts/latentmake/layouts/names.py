"""Names of tensors in cache files, and the metadata that trainers read from them."""

from __future__ import annotations

from collections.abc import Sequence

from latentmake.base import digest
from latentmake.config.makers import Architecture
from latentmake.config.models import Model
from latentmake.formats.cachefile import CAPTION, ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip


def plain_latents_metadata(
    scaling: float, shift: float, original: tuple[int, int], pixels: tuple[int, int]
) -> dict[str, str]:
    """Return the metadata of a latents file.

    A network takes (latents - shift) * scaling.

    Args:
        scaling: scaling factor of the VAE.
        shift: shift factor of the VAE.
        original: width and height of the upright image, in pixels.
        pixels: width and height of the image as encoded, in pixels.
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
_MUSUBI = {"architecture": "wan", "format_version": "1.0.1"}


def latents_key(kind: str, shape: Sequence[int], dtype: str) -> str:
    """Return the name of a tensor of latents [C, F, h, w]: `latents_1x32x48_bfloat16`.

    `kind` is `latents`, `latents_image` or `latents_control`.
    """
    return f"{kind}_{'x'.join(map(str, shape[1:]))}_{dtype}"


def musubi_latents_metadata(width: int, height: int, frames: int | None) -> dict[str, str]:
    """Return the metadata of a latents file: the size in its name, and the number of frames."""
    metadata = {**_MUSUBI, "width": str(width), "height": str(height)}
    return metadata if frames is None else {**metadata, "frame_count": str(frames)}


def text_metadata(caption: str) -> dict[str, str]:
    """Return the metadata of a text file: musubi-tuner's keys, and the digest of the caption.

    When musubi-tuner writes another caption into the file, it keeps our key. The digest then does
    not match the caption, which shows the change.
    """
    return {**_MUSUBI, "caption1": caption, CAPTION: digest.of_bytes(caption.encode())}


def frames_and_sides(model: Model, size: Size, clip: Clip | None) -> tuple[str, str]:
    """Return frames and sides of an item's latents, as names of tensors contain them.

    Args:
        model: model of the caches.
        size: target size of the image or of the frames, in pixels.
        clip: clip or section; None for an image.

    Returns:
        A pattern of the number of latent frames, and `{height}x{width}` of the latents.
    """
    scripts = model.spec.scripts
    frames = str(1 if clip is None else (clip.frames - 1) // scripts.frames + 1)
    if scripts.sections or scripts.layers:
        frames = "[0-9]+"  # depends on the section, or on the number of layers
    multiples = [scripts.rounded.get(argument, 1) for argument in model.latents_arguments]
    side = max(multiples, default=1)
    width, height = (-(-length // side) * side // scripts.pixels for length in size)
    return frames, f"{height}x{width}"


def array_name(kind: str, architecture: Architecture, height: int, width: int) -> str:
    """Return the name of an array in a file of latents: `latents_64x96`, or only `latents`.

    SD 3, Flux and later architectures may have several resolutions in one file.

    Args:
        kind: `latents`, `latents_flipped`, `original_size`, `crop_ltrb` or `alpha_mask`.
        architecture: architecture of the model.
        height: height of the latents.
        width: width of the latents.
    """
    return f"{kind}_{height}x{width}" if architecture.sized_arrays else kind
