"""Caches of ai-training for adoption: names of the files, and checks of their content.

`export` describes the files. A file does not tell its image, caption or weights. Only if
`export_{run}` wrote it, it has the key of a target.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator

from latentmake.base.errors import CacheError, OtherSizeError, OutdatedError
from latentmake.encode.reading import Reading
from latentmake.formats.cachefile import KEY
from latentmake.formats.media import opened_image
from latentmake.formats.metadata import orientation
from latentmake.formats.safetensors import DTYPES, Head, Tensor
from latentmake.geometry.buckets import Size
from latentmake.layouts.names import LATENTS, hidden_state, plain_latents_metadata
from latentmake.models.files import text_tokens, text_width, vae_factor
from latentmake.models.parameterization import scale_of
from latentmake.plan.orders import Order, Target

_NAMES = {"latents": "latent", "text": "emb"}


def names(order: Order, stem: str) -> Iterator[str]:
    """Yield the name of a target's file, below the folder of the images, if it can have one."""
    endings = order.model_settings.ai_training
    assert endings is not None
    if order.kind == "latents" and endings.latents:
        yield f"{stem}{endings.latents}"
    # ai-training trains on one text file only, so a model with several text encoders adopts none.
    elif order.kind == "text" and endings.text and not endings.text[1:]:
        yield f"{stem}{endings.text[0]}"


def check(
    head: Head, order: Order, reading: Reading, target: Target, sizes: Collection[tuple[int, int]]
) -> bool:
    """Check the header of a file; see `trainer_caches.check`.

    Return whether the file is an export of ours, whose key tells its origin.
    """
    tensor = _tensor(head, order)
    if order.kind == "text":
        _check_text(tensor, order)
    else:
        _check_latents(tensor, order, reading, target, sizes)
    if KEY in head.metadata and head.metadata[KEY] != reading.keys[target]:
        what = f"was exported of what {reading.work.item.name} held before, or by another model"
        raise OutdatedError(what)
    return KEY in head.metadata


def _tensor(head: Head, order: Order) -> Tensor:
    """Return a file's only tensor, if it has the right name and dtype."""
    name, tensors = _NAMES[order.kind], head.tensors
    if tensors.keys() != {name}:
        names_there = ", ".join(sorted(tensors)) or "nothing"
        raise CacheError(f"holds {names_there}, not `{name}` alone")
    tensor, wanted = tensors[name], order.recipe["dtype"]
    if (dtype := DTYPES.get(tensor.dtype, tensor.dtype)) != wanted:
        key = "text_dtype" if order.kind == "text" else "vae_dtype"
        hint = f"set {key}: {dtype} of models.{order.model}"
        raise CacheError(f"holds `{name}` in {dtype}, not in {wanted}", hint=hint)
    return tensor


def _check_text(tensor: Tensor, order: Order) -> None:
    (place,) = order.model_settings.text
    tokens, width, shape = text_tokens(place), text_width(place), tensor.shape
    assert tokens is not None
    longest, is_padded = tokens
    fits = len(shape) == 2 and (longest if is_padded else 1) <= shape[0] <= longest
    if not fits or width not in (None, shape[1]):
        many = f"{longest}" if is_padded else f"1 to {longest}"
        hint = "" if place.projection else "name the pipeline's projection as `projection` of text"
        raise CacheError(f"is {[*shape]}, not [{many}, {width or 'D'}]", hint=hint)


def _check_latents(
    tensor: Tensor,
    order: Order,
    reading: Reading,
    target: Target,
    sizes: Collection[tuple[int, int]],
) -> None:
    item, settings = reading.work.item, order.dataset_settings
    factor = vae_factor(order.model_settings.vae)
    assert factor is not None and target.size is not None

    def sides(size: Size) -> tuple[int, int]:
        placed = order.layout.place(reading.size, size, settings, item.image).target
        return placed.height // factor, placed.width // factor

    if tensor.shape[1:] != (wanted := sides(target.size)):
        fits = any(tensor.shape[1:] == sides(Size(*size)) for size in sizes)
        kind = OtherSizeError if fits else CacheError
        what = f"holds latents of {[*tensor.shape]}, not of {wanted[0]} x {wanted[1]}"
        raise kind(what, hint="check the resolutions of the run and `fit` of the dataset")
    if settings.exif_rotation and _is_turned(reading.data, item.image):
        what = "is of the image as it is stored, and its EXIF orientation turns it"
        raise CacheError(what, hint="let it be encoded, or set `exif_rotation: false`")


def _is_turned(data: bytes, path: str) -> bool:
    """Whether EXIF turns an image for display; ai-training encodes it as it is stored."""
    with opened_image(io.BytesIO(data), path, None) as image:
        return image.format != "TIFF" and orientation(image, decodes=False) > 1


def renamed(head: Head, order: Order, reading: Reading) -> tuple[dict[str, object], dict[str, str]]:
    """Return the header entry of the file's tensor under our name, and our own file's metadata."""
    ((_, entry),) = head.entries.items()
    if order.kind == "text":
        return {hidden_state(0): entry}, {"caption": reading.data.decode()}
    model = order.model_settings
    factor, (scaling, shift, _) = vae_factor(model.vae) or 1, scale_of(model)
    height, width = (side * factor for side in entry["shape"][1:])
    return {LATENTS: entry}, plain_latents_metadata(scaling, shift, reading.size, (width, height))
