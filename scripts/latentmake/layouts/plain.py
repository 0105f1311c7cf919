"""Layout of our own trainers.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors    latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors               {encoder}.hidden_state [T, D]
    cache/{dataset}/{model}/text.1/{stem}.text.safetensors             the same of another variant

Images in sub-folders keep their relative path.
"""

from __future__ import annotations

from latentmake.config.datasets import Dataset
from latentmake.files.cachefile import ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.geometry.buckets import Placement, Size, placement
from latentmake.layouts.layout import Layout

LATENTS = "latents"
LATENTS_ENDING = ".latents.safetensors"
TEXT_ENDING = ".text.safetensors"


def path(dataset: str, model: str, part: str, stem: str) -> str:
    """Return a target's path; `part` is one of text or a resolution's name."""
    ending = TEXT_ENDING if part.startswith("text") else LATENTS_ENDING
    return f"cache/{dataset}/{model}/{part}/{stem}{ending}"


class Plain(Layout):
    """Layout of our own trainers."""

    name = "plain"
    encoding = "plain"
    text_ending = TEXT_ENDING
    latents_ending = LATENTS_ENDING
    longest_ending = LATENTS_ENDING
    names_media = False
    any_size = True
    lists_sources = False

    def placement(self, resolution: Size, image: Size, settings: Dataset) -> Placement:
        """Return how an upright image is brought to its size."""
        return placement(image, resolution, settings)


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


LAYOUTS = (Plain(),)
