"""Layout of our own trainers.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors    latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors               {encoder}.hidden_state [T, D]
    cache/{dataset}/{model}/text.1/{stem}.text.safetensors             the same of another variant

Images in sub-folders keep their relative path.
"""

from __future__ import annotations

from latentmake.files.cachefile import ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.layouts.layout import Layout

LATENTS = "latents"


class Plain(Layout):
    """Layout of our own trainers, whatever the architecture."""

    name = "plain"
    encoding = "plain"
    text_ending = ".text.safetensors"
    latents_ending = ".latents.safetensors"
    longest_ending = latents_ending
    external = False

    def __init__(self, architecture: str = "") -> None:
        pass


LAYOUT = Plain


def latents_metadata(
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
