"""Caches of other programs, for adoption: bytes are kept, and stamped with our key.

A file must have the name, the tensors and the shapes that a target is to have. These are those of
musubi-tuner's dataset/cache_io.py and of sd-scripts' library/strategy_*.py. A text of musubi-tuner
says its caption; no other file says what it was made of.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake import digest
from latentmake.caches.inputs import Reading, stored_size
from latentmake.errors import CacheError, OutdatedError
from latentmake.exchange import ai_training
from latentmake.files import npz
from latentmake.files.cachefile import CAPTION, head_of
from latentmake.files.safetensors import Tensor, parse_head
from latentmake.geometry.buckets import crop_ltrb
from latentmake.layouts.layout import parsed
from latentmake.layouts.tensors import array_name, frames_and_sides
from latentmake.models.shapes import text_width
from latentmake.plan.orders import Order, Part, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OLD = ".npz"  # ending of latents of Stable Diffusion in former versions of sd-scripts
_CLOSE = 1e-6
_KEPT = ("caption_separator", "caption_and_tags", "seed")  # which sd-scripts' captions have too
_CHUNK = 75
_CONTROL = "latents_control"

Tensors = Mapping[str, Tensor]
Arrays = Mapping[str, "NDArray[Any]"]


def candidates(folders: Iterable[str], order: Order, stem: str, target: Target) -> list[Path]:
    """Return the files of some folders that may be an item's target, by their names."""
    names = [*_names(order, stem, target)]
    paths = (Path(folder, name) for folder in folders for name in names)
    return [path for path in paths if path.is_file()]


def sizes_of(parts: Iterable[Part]) -> list[tuple[int, int]]:
    """Return the resolutions of the latents among some parts."""
    return [size for part in parts if (size := parsed(part.name).size)]


def check(
    data: bytes, order: Order, reading: Reading, target: Target, sizes: Collection[tuple[int, int]]
) -> bool:
    """Check what a file holds; return whether it tells what it was made of: a caption does.

    `sizes` are all resolutions of the run.

    Raises:
        CacheError: it does not fit.
        SourceError: the item's caption is faulty.
    """
    kind = "npz" if order.layout.npz else "safetensors"
    try:
        arrays = npz.load(io.BytesIO(data)) if order.layout.npz else {}
        head = None if order.layout.npz else parse_head(data)
    except Exception as error:  # numpy raises many kinds
        raise CacheError(f"is cut short or no {kind} file ({error})") from None
    if head is None:
        if order.kind == "text":
            _check_text_arrays(arrays, order)
        else:
            _check_latent_arrays(arrays, order, reading, target)
        return False
    if not order.layout.external:
        return ai_training.check(head, order, reading, target, sizes)
    scripts = order.model_settings.spec.scripts
    assert scripts is not None
    if (architecture := head.metadata.get("architecture")) != scripts.header:
        raise CacheError(f"is of the architecture {architecture}, not {scripts.header}")
    if order.kind == "text":
        _check_text(head.tensors, head.metadata, order, reading)
        return True
    _check_latents(head.tensors, order, reading, target)
    return False


def stamped(data: bytes, order: Order, reading: Reading, stamp: dict[str, str]) -> bytes:
    """Return a file with our stamp, as metadata or an archive's comment; all else stays.

    A tensor of ai-training gets the name that ours has.
    """
    if order.layout.npz:
        return npz.stamped(data, stamp)
    head = parse_head(data)
    body, metadata = memoryview(data)[len(head.data) :], {**head.metadata, **stamp}
    if not order.layout.external:
        entries, told = ai_training.renamed(head, order, reading)
        return b"".join((head_of(entries, {**told, **stamp}, body), body))
    if "caption1" in metadata:  # musubi-tuner keeps our key when it writes another caption
        metadata[CAPTION] = digest.of_bytes(str(metadata["caption1"]).encode())
    return b"".join((head_of(head.entries, metadata, body), body))


def _names(order: Order, stem: str, target: Target) -> Iterator[str]:
    """Yield the names that a target's file may have, below a folder."""
    layout, spec = order.layout, order.model_settings.spec
    if not layout.external:
        yield from ai_training.names(order, stem)
        return
    if order.kind == "text":
        yield f"{stem if layout.npz else layout.base(stem)}{layout.text_ending}"
        return
    if layout.npz and not spec.sized_arrays and spec.encodes:
        yield f"{stem}{_OLD}"  # which sd-scripts prefers
    folder, path = layout.folder(order.dataset, order.model, target.part), target.path
    yield path.removeprefix(f"{folder}/") if layout.npz else path.rpartition("/")[2]


def _demand(
    wanted: Iterable[str], found: Mapping[str, object], *, begins: bool = False, hint: str = ""
) -> None:
    """Refuse a file without one of some names, or of beginnings of names."""
    for each in sorted(wanted):
        if not any(name == each or (begins and name.startswith(each)) for name in found):
            others = ", ".join(sorted(found)) or "nothing"
            raise CacheError(f"holds no {each}{'*' * begins}, but {others}", hint=hint)


# -- musubi-tuner ---------------------------------------------------------------------------------


def _check_text(
    found: Tensors, metadata: Mapping[str, str], order: Order, reading: Reading
) -> None:
    scripts, item = order.model_settings.spec.scripts, reading.work.item
    assert scripts is not None
    _demand(scripts.tensors, found, begins=True)
    if (caption := metadata.get("caption1")) != reading.data.decode():
        what = f"is of the caption {str(caption)[:60]!r}, and {item.name} is another"
        raise OutdatedError(what)


def _check_latents(found: Tensors, order: Order, reading: Reading, target: Target) -> None:
    model, item = order.model_settings, reading.work.item
    scripts = model.spec.scripts
    assert scripts is not None and target.size is not None
    size = order.layout.size(stored_size(item), target.size, order.dataset_settings)
    frames, sides = frames_and_sides(model, size, target.clip)
    pattern = re.compile(rf"latents_({frames}x)?{sides}_(float32|float16|bfloat16)?")
    named = next(filter(None, map(pattern.match, found)), None)
    if named is None:
        others = ", ".join(key for key in found if key.startswith("latents_")) or "none"
        raise CacheError(f"holds no latents of {sides} (height x width), but {others}")
    _demand(model.version.tensors, found, begins=True, hint="encode it, or set the model's `task`")
    controls, needed = sum(key.startswith(_CONTROL) for key in found), len(item.controls)
    if scripts.counts_controls and controls != needed:
        raise CacheError(f"holds latents of {controls} controls ({_CONTROL}_*), not of {needed}")
    wanted = model.vae_dtype or (model.dtype if model.spec.encodes else None)
    if named[2] and wanted not in (None, named[2]):
        hint = f"set vae_dtype: {named[2]} of models.{order.model}"
        raise CacheError(f"holds latents in {named[2]}, not in {wanted}", hint=hint)


# -- sd-scripts -----------------------------------------------------------------------------------


def _check_latent_arrays(found: Arrays, order: Order, reading: Reading, target: Target) -> None:
    model, settings = order.model_settings, order.dataset_settings
    strategies, architecture = model.spec.strategies, model.architecture
    assert strategies is not None and architecture is not None and target.size is not None
    image = stored_size(reading.work.item)
    size = order.layout.size(image, target.size, settings)
    height, width = size.height // strategies.pixels, size.width // strategies.pixels
    kinds = ["latents", "original_size", "crop_ltrb"]
    kinds += [each for each in ("alpha_mask",) if settings.alpha_mask]
    kinds += [each for each in ("latents_flipped",) if settings.flip_aug]
    keys = {kind: array_name(kind, architecture, height, width) for kind in kinds}
    _demand(keys.values(), found)
    latents = found[keys["latents"]]
    if latents.shape[-2:] != (height, width):
        what = f"holds latents of the shape {[*latents.shape]}, not of {height} x {width}"
        raise CacheError(what, hint="check the resolutions of the run")
    if (pixels := found[keys["original_size"]].tolist()) != [*image]:
        raise CacheError(f"is of an image of {pixels} pixels")
    crop, own = found[keys["crop_ltrb"]].tolist(), crop_ltrb(size, image)
    close = partial(math.isclose, rel_tol=10 * _CLOSE, abs_tol=_CLOSE)
    if len(crop) != len(own) or not all(map(close, crop, own)):
        raise CacheError(f"is of another bucket than {size.width} x {size.height}")


def _check_text_arrays(found: Arrays, order: Order) -> None:
    model, captions = order.model_settings, order.dataset_settings.captions
    if captions is not None:
        fields = [each for each in type(captions).model_fields if each not in _KEPT]
        if key := captions.first_set(*fields):
            what = f"is of the caption as it is, and captions.{key} of datasets.{order.dataset} "
            what += "changes it"
            raise CacheError(what, hint="leave that out, or let it be encoded")
    wanted = _text_names(order)
    _demand(wanted, found)
    dtype = "float16" if model.caption_dtype == "float16" else "float32"
    for name in sorted(wanted) if model.spec.encodes else ():
        if found[name].dtype.kind == "f" and (stored := found[name].dtype.name) != dtype:
            hint = f"set text_dtype: {stored} of models.{order.model}"
            raise CacheError(f"holds {name} in {stored}, not in {dtype}", hint=hint)
    for key in ("apply_t5_attn_mask", "apply_lg_attn_mask"):
        if key in wanted and (applied := bool(found[key].any())) != getattr(model, key):
            hint = f"set {key}: {str(applied).lower()} of models.{order.model}"
            raise CacheError(f"was made with {key} {applied}", hint=hint)
    if "hidden_state1" in wanted and model.spec.encodes:
        tokens = 77 if model.max_token_length == _CHUNK else int(model.max_token_length) + 2
        for number, place in enumerate(model.text, 1):
            shape, width = found[f"hidden_state{number}"].shape, text_width(place)
            if shape[0] != tokens or width not in (None, shape[-1]):
                what = f"holds hidden_state{number} of the shape {list(shape)}, not "
                raise CacheError(f"{what}{[tokens, width or 'D']}")


def _text_names(order: Order) -> set[str]:
    model = order.model_settings
    strategies, clips = model.spec.strategies, len(model.spec.clips)
    if strategies is not None and strategies.text is not None:
        return set(strategies.text.arrays)
    if clips == len(model.text):
        return {"hidden_state1", "hidden_state2", "pool2"}
    found = {"t5_out", "t5_attn_mask", "apply_t5_attn_mask"}
    if clips == 1:
        return found | {"l_pooled", "txt_ids"}
    more = {"lg_out", "lg_pooled", "clip_l_attn_mask", "clip_g_attn_mask", "apply_lg_attn_mask"}
    return found | more
