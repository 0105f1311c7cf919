"""Caches of sd-scripts: what an npz file must hold to be a target, and our stamp in its comment.

Names and arrays are those of its library/strategy_*.py. A file of text does not say its caption.
"""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from latentmake.caches.inputs import Reading
from latentmake.config.models import Model
from latentmake.data.item import Item
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.shapes import latents_shape, text_width
from latentmake.files import npz
from latentmake.geometry.buckets import Size, crop_ltrb
from latentmake.layouts.layout import array_name
from latentmake.plan.orders import Order
from latentmake.plan.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

# numpy reads headers by Python's ast, which fails now and then in several threads of Python 3.11.
_READING = threading.Lock()
_OLD = ".npz"  # ending of latents of Stable Diffusion in former versions
_CLOSE = 1e-6
_KEPT = ("caption_separator", "caption_and_tags", "seed")  # which its captions have too
_CHUNK = 75


def names(work: Order, item: Item, target: Target) -> Iterator[str]:
    """Yield the names that sd-scripts gives a target's file, below the folder of the images."""
    layout, architecture = work.layout, work.model_settings.spec
    if work.kind == "text":
        yield f"{item.stem}{layout.text_ending}"
        return
    folder = layout.folder(work.dataset, work.model, target.part)
    if not architecture.sized_arrays and architecture.encodes:
        yield f"{item.stem}{_OLD}"  # which it prefers
    yield target.path.removeprefix(f"{folder}/")


def check(data: bytes, work: Order, source: Reading, target: Target, name: str) -> bool:
    """Check a file; return whether it tells what it was made of, which none does.

    Raises:
        CacheError: it is damaged, or holds something else.
    """
    import numpy as np

    try:
        with _READING, np.load(io.BytesIO(data), allow_pickle=False) as archive:
            found: dict[str, NDArray[Any]] = {key: archive[key] for key in archive.files}
        npz.comment_of(data, len(data))
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        what = "is cut short or no npz file"
        raise CacheError(what if not str(error).startswith("is ") else str(error)) from None
    if work.kind == "text":
        _check_text(work, found)
    else:
        _check_latents(work, source.item, target, found)
    for key, array in found.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CacheError(f"holds NaN or infinity ({key})")
    return False


def _demand(wanted: set[str], found: Mapping[str, object]) -> None:
    if missing := sorted(wanted - found.keys()):
        raise CacheError(f"holds no {missing[0]}, but {', '.join(sorted(found)) or 'nothing'}")


def _check_latents(
    work: Order, item: Item, target: Target, found: Mapping[str, NDArray[Any]]
) -> None:
    import numpy as np

    model, settings = work.model_settings, work.dataset_settings
    architecture, strategies = model.architecture, model.spec.strategies
    assert architecture is not None and item.media is not None and target.size is not None
    assert strategies is not None
    image = Size(item.media.width, item.media.height)
    try:
        size = work.layout.size(image, target.size, settings)
    except SourceError as error:
        raise CacheError(f"is of an image that {error.what}") from None
    height, width = size.height // strategies.pixels, size.width // strategies.pixels

    def key(kind: str) -> str:
        return array_name(kind, architecture, height, width)

    _demand({key(each) for each in ("latents", "original_size", "crop_ltrb")}, found)
    _demand({key("latents_flipped")} if settings.flip_aug else set(), found)
    _demand({key("alpha_mask")} if settings.alpha_mask else set(), found)
    latents, known = found[key("latents")], latents_shape(model.vae) if model.spec.encodes else None
    channels = strategies.channels or (known.channels if known else None)
    if latents.shape[-2:] != (height, width) or channels not in (None, latents.shape[0]):
        wanted = [channels or "C", height, width]
        raise CacheError(f"holds latents of the shape {list(latents.shape)}, not {wanted}")
    if latents.dtype != np.float32:
        raise CacheError(f"holds latents in {latents.dtype}, not in float32")
    if found[key("original_size")].tolist() != list(image):
        raise CacheError(f"is of an image of {found[key('original_size')].tolist()} pixels")
    if not np.allclose(found[key("crop_ltrb")], crop_ltrb(size, image), atol=_CLOSE):
        raise CacheError(f"is of another bucket than {size.width} x {size.height}")
    if not latents.any():
        raise CacheError("holds nothing but zeros (latents)")


def _check_text(work: Order, found: Mapping[str, NDArray[Any]]) -> None:
    import numpy as np

    model, captions = work.model_settings, work.dataset_settings.captions
    if captions is not None:
        fields = [each for each in type(captions).model_fields if each not in _KEPT]
        if key := captions.first_set(*fields):
            what = f"is of the caption as it is, and captions.{key} of datasets.{work.dataset} "
            what += "changes it"
            raise CacheError(what, hint="leave that out, or let it be encoded")
    wanted = _text_arrays(model)
    _demand(wanted, found)
    dtype = np.dtype(np.float16 if model.caption_dtype == "float16" else np.float32)
    for key in sorted(wanted):
        array = found[key]
        if array.dtype.kind == "f" and array.dtype != dtype and model.spec.encodes:
            hint = f"set text_dtype: {array.dtype} of models.{work.model}"
            raise CacheError(f"holds {key} in {array.dtype}, not in {dtype}", hint=hint)
        if array.dtype.kind == "f" and not array.any() and key != "txt_ids":
            raise CacheError(f"holds nothing but zeros ({key})")
    for key in ("apply_t5_attn_mask", "apply_lg_attn_mask"):
        if key in wanted and bool(found[key]) != getattr(model, key):
            hint = f"set {key}: {str(bool(found[key])).lower()} of models.{work.model}"
            raise CacheError(f"was made with {key} {bool(found[key])}", hint=hint)
    if "hidden_state1" in wanted and model.spec.encodes:
        tokens = 77 if model.max_token_length == _CHUNK else int(model.max_token_length) + 2
        for number, place in enumerate(model.text, 1):
            shape, width = found[f"hidden_state{number}"].shape, text_width(place)
            if shape[0] != tokens or width not in (None, shape[-1]):
                what = f"holds hidden_state{number} of the shape {list(shape)}, not "
                raise CacheError(f"{what}{[tokens, width or 'D']}")


def _text_arrays(model: Model) -> set[str]:
    """Return the names of the arrays in a file of text."""
    strategies = model.spec.strategies
    if strategies is not None and strategies.text is not None:
        return set(strategies.text.arrays)
    clips = len(model.spec.clips)
    if clips == len(model.text):
        return {"hidden_state1", "hidden_state2", "pool2"}
    found = {"t5_out", "t5_attn_mask", "apply_t5_attn_mask"}
    if clips == 1:
        return found | {"l_pooled", "txt_ids"}
    more = {"lg_out", "lg_pooled", "clip_l_attn_mask", "clip_g_attn_mask", "apply_lg_attn_mask"}
    return found | more


def stamped(data: bytes, stamp: Mapping[str, str]) -> bytes:
    """Return a file with our stamp as its comment; all else stays."""
    return npz.stamped(data, stamp)
