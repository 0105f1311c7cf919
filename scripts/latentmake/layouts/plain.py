"""The layout of our own trainers.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors    latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors               {encoder}.hidden_state [T, D]

Images in sub-folders keep their relative path.
"""

from __future__ import annotations

__all__ = [
    "LATENTS",
    "LATENTS_ENDING",
    "TEXT_ENDING",
    "encoder_name",
    "ending",
    "folder",
    "path",
]

LATENTS = "latents"
LATENTS_ENDING = ".latents.safetensors"
TEXT_ENDING = ".text.safetensors"


def ending(part: str) -> str:
    """Return what a target's name ends in; `part` is `text` or a resolution's name."""
    return TEXT_ENDING if part == "text" else LATENTS_ENDING


def folder(dataset: str, model: str, part: str) -> str:
    """Return the folder of one dataset's targets of one model and part."""
    return f"cache/{dataset}/{model}/{part}"


def path(dataset: str, model: str, part: str, stem: str) -> str:
    """Return a target's path."""
    return f"{folder(dataset, model, part)}/{stem}{ending(part)}"


def encoder_name(index: int) -> str:
    """Return the name under which the text encoder at `index` (from 0) keeps its tensors.

    These are the names of a diffusers pipeline's parts: text_encoder, text_encoder_2 and so on.
    """
    return "text_encoder" if index == 0 else f"text_encoder_{index + 1}"
