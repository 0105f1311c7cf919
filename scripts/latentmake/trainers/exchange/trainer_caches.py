"""Caches of other programs, for adoption: checks of a file, and our key as a stamp on its bytes.

A file must have the name, tensors and shapes of a target. They follow musubi-tuner's
dataset/cache_io.py and sd-scripts' library/strategy_*.py. Embeddings of musubi-tuner tell their
caption; no other file of these trainers tells its origin.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.base import digest
from latentmake.base.errors import CacheError, OutdatedError, first_line
from latentmake.encode.reading import Reading, stored_size
from latentmake.formats import npz
from latentmake.formats.cachefile import CAPTION, head_of
from latentmake.formats.safetensors import Tensor, parse_head
from latentmake.geometry.buckets import crop_ltrb
from latentmake.layouts.layout import resolution_of
from latentmake.layouts.names import array_name, frames_and_sides
from latentmake.models.files import text_width
from latentmake.plan.orders import Order, Part, Target
from latentmake.trainers.exchange import ai_training

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OLD = ".npz"  # ending of Stable Diffusion's latents in former versions of sd-scripts
_CLOSE = 1e-6  # tolerance for the values of a crop
# Settings with which sd-scripts' captions are the same as ours.
_KEPT = ("caption_separator", "caption_and_tags", "seed")
_CHUNK = 75  # tokens of a chunk, without its start and end tokens
_CONTROL = "latents_control"

Tensors = Mapping[str, Tensor]
Arrays = Mapping[str, "NDArray[Any]"]


def candidates(folders: Iterable[str], order: Order, stem: str, target: Target) -> list[Path]:
    """Return the files in some folders that may be an item's target, judged by their names."""
    names = [*_names(order, stem, target)]
    paths = (Path(folder, name) for folder in folders for name in names)
    return [path for path in paths if path.is_file()]


def sizes_of(parts: Iterable[Part]) -> list[tuple[int, int]]:
    """Return the resolutions of those parts that are latents."""
    return [size for part in parts if (size := resolution_of(part.name))]


def check(
    data: bytes, order: Order, reading: Reading, target: Target, sizes: Collection[tuple[int, int]]
) -> bool:
    """Check the content of a file, and return whether the file tells its origin.

    Args:
        data: bytes of the file.
        order: order of the target.
        reading: inputs of the item.
        target: target that the file may become.
        sizes: all resolutions of the run.

    Returns:
        Whether the file tells its origin: by its caption, or by the key in an export of ours.

    Raises:
        CacheError: the file does not fit.
        SourceError: the item's caption is faulty.
    """
    try:
        arrays = npz.load(io.BytesIO(data)) if order.layout.npz else {}
        head = None if order.layout.npz else parse_head(data)
    except (OSError, ValueError) as error:
        raise CacheError(first_line(error)) from None
    if head is None:
        if order.kind == "text":
            _check_text_arrays(arrays, order)
        else:
            _check_latent_arrays(arrays, order, reading, target)
        return False
    if not order.layout.external:
        return ai_training.check(head, order, reading, target, sizes)
    scripts = order.model_settings.spec.scripts
    if (architecture := head.metadata.get("architecture")) != scripts.header:
        raise CacheError(f"is of the architecture {architecture}, not {scripts.header}")
    if order.kind == "text":
        _check_text(head.tensors, head.metadata, order, reading)
        return True
    _check_latents(head.tensors, order, reading, target)
    return False


def stamped(data: bytes, order: Order, reading: Reading, stamp: dict[str, str]) -> bytes:
    """Return a file with our stamp in its metadata, or in the comment of an archive.

    All else stays, except that a tensor of ai-training gets our name.
    """
    if order.layout.npz:
        return npz.stamped(data, stamp)
    head = parse_head(data)
    body, metadata = memoryview(data)[len(head.data) :], {**head.metadata, **stamp}
    if not order.layout.external:
        entries, own = ai_training.renamed(head, order, reading)
        return b"".join((head_of(entries, {**own, **stamp}, body), body))
    # If musubi-tuner later writes another caption into the file, it keeps our key: then the digest
    # of the caption reveals the change.
    if "caption1" in metadata:
        metadata[CAPTION] = digest.of_bytes(str(metadata["caption1"]).encode())
    return b"".join((head_of(head.entries, metadata, body), body))


def _names(order: Order, stem: str, target: Target) -> Iterator[str]:
    """Yield possible names of a target's file below a folder, the preferred one first."""
    layout, spec = order.layout, order.model_settings.spec
    if not layout.external:
        yield from ai_training.names(order, stem)
        return
    if order.kind == "text":
        yield f"{stem if layout.npz else layout.base(stem)}{layout.text_ending}"
        return
    if layout.npz and not spec.sized_arrays and spec.encodes:
        yield f"{stem}{_OLD}"  # first, as sd-scripts prefers it
    folder, path = layout.folder(order.dataset, order.model, target.part), target.path
    yield path.removeprefix(f"{folder}/") if layout.npz else path.rpartition("/")[2]


def _demand(
    wanted: Iterable[str], tensors: Mapping[str, object], *, begins: bool = False, hint: str = ""
) -> None:
    """Refuse a file that lacks a tensor of a wanted name; raises CacheError.

    With `begins` the wanted names are prefixes.
    """
    for key in sorted(wanted):
        if not any(name == key or (begins and name.startswith(key)) for name in tensors):
            others = ", ".join(sorted(tensors)) or "nothing"
            star = "*" if begins else ""
            raise CacheError(f"holds no {key}{star}, but {others}", hint=hint)


# -- musubi-tuner ---------------------------------------------------------------------------------


def _check_text(
    tensors: Tensors, metadata: Mapping[str, str], order: Order, reading: Reading
) -> None:
    scripts, item = order.model_settings.spec.scripts, reading.work.item
    _demand(scripts.tensors, tensors, begins=True)
    if (caption := metadata.get("caption1")) != reading.data.decode():
        what = f"is of the caption {str(caption)[:60]!r}, and {item.name} is another"
        raise OutdatedError(what)


def _check_latents(tensors: Tensors, order: Order, reading: Reading, target: Target) -> None:
    model, item = order.model_settings, reading.work.item
    scripts = model.spec.scripts
    assert target.size is not None
    size = order.layout.size(stored_size(item), target.size, order.dataset_settings)
    frames, sides = frames_and_sides(model, size, target.clip)
    pattern = re.compile(rf"latents_({frames}x)?{sides}_(float32|float16|bfloat16)?")
    named = next(filter(None, map(pattern.match, tensors)), None)
    if named is None:
        others = ", ".join(key for key in tensors if key.startswith("latents_")) or "none"
        raise CacheError(f"holds no latents of {sides} (height x width), but {others}")
    hint = "encode it, or set the model's `task`"
    _demand(model.version.tensors, tensors, begins=True, hint=hint)
    controls, needed = sum(key.startswith(_CONTROL) for key in tensors), len(item.controls)
    if scripts.counts_controls and controls != needed:
        raise CacheError(f"holds latents of {controls} controls ({_CONTROL}_*), not of {needed}")
    wanted = model.vae_dtype or (model.dtype if model.spec.encodes else None)
    if named[2] and wanted not in (None, named[2]):
        hint = f"set vae_dtype: {named[2]} of models.{order.model}"
        raise CacheError(f"holds latents in {named[2]}, not in {wanted}", hint=hint)


# -- sd-scripts -----------------------------------------------------------------------------------


def _check_latent_arrays(arrays: Arrays, order: Order, reading: Reading, target: Target) -> None:
    model, settings = order.model_settings, order.dataset_settings
    strategies = model.spec.strategies
    assert target.size is not None
    image = stored_size(reading.work.item)
    size = order.layout.size(image, target.size, settings)
    height, width = size.height // strategies.pixels, size.width // strategies.pixels
    kinds = ["latents", "original_size", "crop_ltrb"]
    if settings.alpha_mask:
        kinds.append("alpha_mask")
    if settings.flip_aug:
        kinds.append("latents_flipped")
    keys = {kind: array_name(kind, strategies, height, width) for kind in kinds}
    _demand(keys.values(), arrays)
    latents = arrays[keys["latents"]]
    if latents.shape[-2:] != (height, width):
        what = f"holds latents of the shape {[*latents.shape]}, not of {height} x {width}"
        raise CacheError(what, hint="check the resolutions of the run")
    if (pixels := arrays[keys["original_size"]].tolist()) != [*image]:
        raise CacheError(f"is of an image of {pixels} pixels")
    crop, own = arrays[keys["crop_ltrb"]].tolist(), crop_ltrb(size, image)
    close = partial(math.isclose, rel_tol=10 * _CLOSE, abs_tol=_CLOSE)
    if len(crop) != len(own) or not all(map(close, crop, own)):
        raise CacheError(f"is of another bucket than {size.width} x {size.height}")


def _check_text_arrays(arrays: Arrays, order: Order) -> None:
    model, captions = order.model_settings, order.dataset_settings.captions
    if captions is not None:
        fields = [field for field in type(captions).model_fields if field not in _KEPT]
        if key := captions.first_set(*fields):
            what = f"is of the caption as it is, and captions.{key} of datasets.{order.dataset} "
            what += "changes it"
            raise CacheError(what, hint="leave that out, or let it be encoded")
    encoder = model.spec.encoder("text")
    wanted = {*(encoder.arrays if encoder else model.spec.strategies.text_arrays)}
    _demand(wanted, arrays)
    dtype = "float16" if model.caption_dtype == "float16" else "float32"
    for name in sorted(wanted) if model.spec.encodes else ():
        if arrays[name].dtype.kind == "f" and (stored := arrays[name].dtype.name) != dtype:
            hint = f"set text_dtype: {stored} of models.{order.model}"
            raise CacheError(f"holds {name} in {stored}, not in {dtype}", hint=hint)
    for key in ("apply_t5_attn_mask", "apply_lg_attn_mask"):
        if key in wanted and (applied := bool(arrays[key].any())) != getattr(model, key):
            hint = f"set {key}: {str(applied).lower()} of models.{order.model}"
            raise CacheError(f"was made with {key} {applied}", hint=hint)
    if "hidden_state1" in wanted and model.spec.encodes:
        tokens = 77 if model.max_token_length == _CHUNK else int(model.max_token_length) + 2
        for number, place in enumerate(model.text, 1):
            shape, width = arrays[f"hidden_state{number}"].shape, text_width(place)
            if shape[0] != tokens or width not in (None, shape[-1]):
                what = f"holds hidden_state{number} of the shape {list(shape)}, not "
                raise CacheError(f"{what}{[tokens, width or 'D']}")
