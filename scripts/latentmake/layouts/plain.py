"""The layout of our own trainers.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors    latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors               {encoder}.hidden_state [T, D]
    cache/{dataset}/{model}/text.1/{stem}.text.safetensors             the same of another variant

Images in sub-folders keep their relative path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from latentmake.buckets import Size, placement
from latentmake.cachefile import ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.clips import Clip
from latentmake.config import Dataset
from latentmake.layouts import Named
from latentmake.media import Media

__all__ = [
    "DROPPED",
    "LATENTS",
    "LATENTS_ENDING",
    "TEXT_ENDING",
    "base",
    "encoder_name",
    "ending",
    "folder",
    "hidden_state",
    "identity",
    "latents_metadata",
    "longest_ending",
    "named",
    "owners",
    "parts",
    "path",
    "row",
    "variant",
]

DROPPED = "text.dropped"
"""The part of the empty captions that stand in for others in some epochs."""

LATENTS = "latents"
LATENTS_ENDING = ".latents.safetensors"
TEXT_ENDING = ".text.safetensors"
longest_ending = LATENTS_ENDING


def parts(resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
    """Return the parts of one dataset and model: each resolution, and each variant of the text."""
    return [*resolutions, *texts]


def ending(part: str) -> str:
    """Return what a target's name ends in; `part` is one of text or a resolution's name."""
    return TEXT_ENDING if part.startswith("text") else LATENTS_ENDING


def folder(dataset: str, model: str, part: str) -> str:
    """Return the folder of one dataset's targets of one model and part."""
    return f"cache/{dataset}/{model}/{part}"


def path(dataset: str, model: str, part: str, stem: str) -> str:
    """Return a target's path."""
    return f"{folder(dataset, model, part)}/{stem}{ending(part)}"


def named(
    folder: str, part: str, stem: str, media: Media | None, settings: Dataset | None
) -> Sequence[Named]:
    """Return an item's one target of a part."""
    if part.startswith("text"):
        return (Named(f"{folder}/{stem}{TEXT_ENDING}"),)
    return (Named(f"{folder}/{stem}{LATENTS_ENDING}"),)


def variant(
    resolution: Size | None, image: Size, settings: Dataset | None, clip: Clip | None
) -> str:
    """Return how an image is scaled and cut; "" for text."""
    if resolution is None or settings is None:
        return ""
    return placement(image, resolution, vars(settings)).name


def base(stem: str) -> str:
    """Return the stem: cache files keep it whole."""
    return stem


def owners(name: str) -> Sequence[str]:
    """Return the stem of the item that a file below a part's folder belongs to."""
    for each in (LATENTS_ENDING, TEXT_ENDING):
        if name.endswith(each):
            return (name[: -len(each)],)
    return ()


def identity(stem: str, path: str) -> str:
    """Return the stem: there is one target of it in a part."""
    return stem


def row(targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return `latents` (resolution -> path), `text` (path), and paths of further variants of it.

    These are `variants`, with the first, where there are several, and `dropped`, the empty caption.
    """
    texts = {part: paths[0] for part, paths in targets.items() if part.startswith("text")}
    row: dict[str, object] = {
        "latents": {part: paths[0] for part, paths in targets.items() if part not in texts},
        "text": texts["text"],
    }
    if DROPPED in texts:
        row["dropped"] = texts.pop(DROPPED)
    if len(texts) > 1:
        row["variants"] = list(texts.values())
    return row


def latents_metadata(
    scaling: float, shift: float, original: tuple[int, int], pixels: tuple[int, int]
) -> dict[str, str]:
    """Return what a latents file's header says besides our key.

    Args:
        scaling: factor by which a network expects latents to be multiplied.
        shift: what it expects to be subtracted before.
        original: width and height of the upright image, in pixels.
        pixels: width and height of what was encoded.
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
    """Return the name under which the text encoder at `index` (from 0) keeps its tensors.

    These are the names of a diffusers pipeline's parts: text_encoder, text_encoder_2 and so on.
    """
    return "text_encoder" if index == 0 else f"text_encoder_{index + 1}"
