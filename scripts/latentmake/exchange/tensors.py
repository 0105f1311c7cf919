"""Caches of musubi-tuner: what a file must hold to be a target, and our stamp in its header.

Names, tensors and metadata are those of its dataset/cache_io.py and of our layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from latentmake import digest
from latentmake.caches.inputs import Reading, caption_of
from latentmake.config.architectures import Scripts
from latentmake.data.item import Item
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.adoption import OutdatedError
from latentmake.files.cachefile import CAPTION, head_of
from latentmake.files.safetensors import Head, Tensor, largest, parse_head
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import SIZED, frames_and_sides
from latentmake.plan.orders import Order
from latentmake.plan.target import Target

_CONTROL = "latents_control"
_DTYPE = re.compile(r"_(float32|float16|bfloat16)$")


def names(work: Order, item: Item, target: Target) -> Iterator[str]:
    """Yield the names that musubi-tuner gives a target's file."""
    layout = work.layout
    if work.kind == "text":
        yield f"{layout.base(item.stem)}{layout.text_ending}"
    else:
        yield target.path.rpartition("/")[2]


def check(data: bytes, work: Order, source: Reading, target: Target, name: str) -> bool:
    """Check a file; return whether it tells what it was made of: a caption does.

    Raises:
        CacheError: it is damaged, or holds something else.
    """
    try:
        head = parse_head(data)
        found = head.tensors
    except ValueError as error:
        raise CacheError(str(error)) from None
    scripts = work.model_settings.spec.scripts
    assert scripts is not None
    if (architecture := head.metadata.get("architecture")) != scripts.header:
        raise CacheError(f"is of the architecture {architecture}, not {scripts.header}")
    if work.kind == "text":
        _check_text(work, source, scripts, head, found)
    else:
        _check_latents(work, source.item, target, scripts, head, found, name)
    body = memoryview(data)[len(head.data) :]
    for key, tensor in found.items():
        if largest(tensor.dtype, body[tensor.start : tensor.end]) is None:
            raise CacheError(f"holds NaN or infinity ({key})")
    # Other tensors may be zeros by right, such as FramePack's clean latents.
    first = re.escape(scripts.tensors[0]) if work.kind == "text" else r"latents_\d"
    for key, tensor in found.items():
        if re.match(first, key) and not any(body[tensor.start : tensor.end]):
            raise CacheError(f"holds nothing but zeros ({key})")
    return work.kind == "text"


def _check_text(
    work: Order,
    source: Reading,
    scripts: Scripts,
    head: Head,
    found: Mapping[str, Tensor],
) -> None:
    if missing := _missing(scripts.tensors, found):
        raise CacheError(f"holds no {missing[0]}*, but {', '.join(found) or 'nothing'}")
    for key, tensor in found.items():
        if key.startswith(scripts.tensors[0]) and not (tensor.shape and all(tensor.shape)):
            raise CacheError(f"holds {key} of the shape {list(tensor.shape)}")
    try:
        text = work.layout.caption(
            caption_of(source.data, source.item.source, work.dataset_settings)
        )
    except SourceError as error:
        raise CacheError(f"is of a caption that {error.what}") from None
    if (caption := head.metadata.get("caption1")) != text:
        what = f"is of the caption {str(caption)[:60]!r}, and {source.item.name} is another"
        raise OutdatedError(what)


def _check_latents(
    work: Order,
    item: Item,
    target: Target,
    scripts: Scripts,
    head: Head,
    found: Mapping[str, Tensor],
    name: str,
) -> None:
    model, layout = work.model_settings, work.layout
    sized = SIZED.fullmatch(name.removesuffix(layout.latents_ending))
    sizes = (
        {"width": "", "height": ""} if sized is None else {"width": sized[2], "height": sized[3]}
    )
    for key, side in sizes.items():
        if head.metadata.get(key) != str(int(side or 0)):
            raise CacheError(f"has another {key} in its header than in its name")
    assert item.media is not None and target.size is not None
    stored = Size(item.media.width, item.media.height)
    size = layout.size(stored, target.size, work.dataset_settings)
    frames, shape = frames_and_sides(model, size, target.clip)
    pattern = re.compile(rf"latents_({frames}x)?{shape}_")
    latents = next((key for key in found if pattern.match(key)), None)
    if latents is None:
        others = ", ".join(key for key in found if key.startswith("latents_")) or "none"
        raise CacheError(f"holds no latents of {shape} (height x width), but {others}")
    _check_shape(latents, found[latents].shape, shape, scripts)
    if missing := _missing(model.version.tensors, found):
        what = f"holds no {missing[0]}*, which {model.task or model.title} needs"
        raise CacheError(what, hint="encode it, or set the model's `task`")
    controls, needed = sum(key.startswith(_CONTROL) for key in found), len(item.controls)
    if scripts.counts_controls and controls != needed:
        raise CacheError(f"holds latents of {controls} controls, not of {needed}")
    wanted = model.vae_dtype or (model.dtype if model.spec.encodes else None)
    dtype = _DTYPE.search(latents)
    if wanted is not None and dtype is not None and dtype[1] != wanted:
        hint = f"set vae_dtype: {dtype[1]} of models.{work.model}"
        raise CacheError(f"holds latents in {dtype[1]}, not in {wanted}", hint=hint)


def _check_shape(key: str, shape: Sequence[int], sides: str, scripts: Scripts) -> None:
    """Compare a tensor's shape to its name; some architectures have the channels last."""
    height, width = map(int, sides.split("x"))
    rows = [list(shape[start : start + 2]) for start in range(len(shape) - 1)]
    channels = scripts.channels.get("latents")
    if [height, width] not in rows or (channels is not None and channels not in shape):
        raise CacheError(f"holds {key} of the shape {list(shape)}")


def _missing(beginnings: Sequence[str], found: Mapping[str, Tensor]) -> list[str]:
    return [each for each in beginnings if not any(key.startswith(each) for key in found)]


def stamped(data: bytes, stamp: Mapping[str, str]) -> bytes:
    """Return a file with our stamp in its header, metadata first and in order; tensors stay."""
    head = parse_head(data)
    metadata = {**head.metadata, **stamp}
    if "caption1" in metadata:
        # musubi-tuner keeps our key when it writes another caption into the file.
        metadata[CAPTION] = digest.of_bytes(str(metadata["caption1"]).encode())
    body = memoryview(data)[len(head.data) :]
    return b"".join((head_of(head.entries, metadata, body), body))
