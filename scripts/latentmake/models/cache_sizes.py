"""Bytes of cache files before they are made, from the files of the encoders.

`latents_tensors` and `text_tensors` name the tensors of a file with their shapes, as the encoders
write them (`encode.encoders`), and `file_bytes` adds the header. No encoder is loaded. The length
of some embeddings depends on the caption, so `lengths` counts its tokens. All functions raise a
ValueError if the size is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.formats.cachefile import head_of
from latentmake.formats.safetensors import DTYPES, Tensor, filled
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import Layout, layout_of
from latentmake.layouts.names import (
    array_name,
    encoder_name,
    frames_and_sides,
    hidden_state,
    latents_key,
)
from latentmake.models.checkpoints import vae_config
from latentmake.models.files import (
    T5_LENGTH,
    network_config,
    text_config,
    text_tokens,
    text_width,
    tokenizer_files,
)
from latentmake.models.headers import contents_of, embedding_width

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> its dtype, as torch names it, and its shape."""

_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}
_NUMBER = 4  # bytes of a number of other dtypes
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CONTROL = "latents_control_"
_MASK_CHANNELS = 4  # more channels in the condition of image-to-video
# The networks of Wan, if no file says it, such as a torch file: tokens and width of
# ViT-huge, which image-to-video reads, and width of umT5-xxl.
_VISION = 257, 1280
_UMT5 = 4096
_VISION_PLACES = re.compile(r"(visual|vision_model)\.(.*\.)?pos(ition)?_embedding(\.weight)?$")
_CHUNK = 75  # tokens of a caption that CLIP sees at once
_T5_SPECIAL = 1  # EOS
# Bytes of an npz file: of its end, and of a member besides its data and two copies of its name.
_NPZ_END, _NPZ_MEMBER = 22, 30 + 46 + 128


# -- latents --------------------------------------------------------------------------------------


def latents_tensors(
    model: Model,
    size: Size,
    frames: int = 1,
    *,
    flips: bool = False,
    masks: bool = False,
    controls: Sequence[Size] = (),
) -> Tensors:
    """Return the tensors of a file of latents.

    Args:
        model: model with the paths of its parts.
        size: size that the image or the frames are scaled and cropped to, in pixels.
        frames: number of frames; 1 for an image.
        flips: whether sd-scripts' file also has the latents of the mirrored image.
        masks: whether sd-scripts' file also has the alpha channel.
        controls: sizes that the control images or videos are scaled to.
    """
    layout = layout_of(model.layout_name)
    if not (model.spec.encodes or layout.npz):
        return _programs_latents(model, size, frames, controls)
    (channels, side, span), dtype = _vae(model), model.vae_dtype or model.dtype
    height, width = size.height // side, size.width // side
    if layout.npz:
        return _arrays(model, (channels, height, width), size, flips=flips, masks=masks)
    if not layout.has_frames:
        return {"latents": (dtype, (channels, height, width))}
    sides = ((frames - 1) // span + 1, height, width)
    shapes = {"latents": (channels, *sides)}
    if model.image_to_video:
        shapes["latents_image"] = (channels + _MASK_CHANNELS, *sides)
    if controls:
        shapes["latents_control"] = (channels, *sides)
    tensors: Tensors = {
        latents_key(kind, shape, dtype): (dtype, shape) for kind, shape in shapes.items()
    }
    if model.clip is not None:
        tensors[f"clip_{dtype}"] = ("float16", _vision(model.clip))
    return tensors


def _programs_latents(model: Model, size: Size, frames: int, controls: Sequence[Size]) -> Tensors:
    """Return the tensors that a script of musubi-tuner writes for latents."""
    scripts, tensors = model.spec.scripts, Tensors()
    others = {*model.version.tensors} - {_CONTROL}
    if scripts.cached_latents is None or others or scripts.sections:
        raise ValueError("its size is unknown")
    dtype, channels = scripts.cached_latents
    dtype = dtype if dtype == "bfloat16" else model.vae_dtype or dtype
    several = {"latents": size}
    if scripts.counts_controls:
        several |= {f"{_CONTROL}{number}": control for number, control in enumerate(controls)}
    for name, own in several.items():
        count = (frames - 1) // scripts.frames + 1 if name == "latents" else 1
        _, sides = frames_and_sides(model, own, None)
        shape = (channels, count, *map(int, sides.split("x")))
        tensors[latents_key(name, shape, dtype)] = dtype, shape
    return tensors


def _arrays(
    model: Model, shape: tuple[int, int, int], size: Size, *, flips: bool, masks: bool
) -> Tensors:
    """Return the arrays of a file of latents for sd-scripts."""
    arrays: Tensors = {
        "latents": ("float32", shape),
        "original_size": ("int64", (2,)),
        "crop_ltrb": ("float64", (4,)),
    }
    if flips:
        arrays["latents_flipped"] = arrays["latents"]
    if masks:
        arrays["alpha_mask"] = ("float32", (size.height, size.width))
    return {array_name(name, model.spec, *shape[1:]): array for name, array in arrays.items()}


def _vae(model: Model) -> tuple[int, int, int]:
    """Return the channels of a VAE's latents, and the pixels and the frames of a latent."""
    spec = model.spec
    if spec.cached_latents:
        return spec.cached_latents[1], spec.pixels, spec.scripts.frames if spec.has_tasks else 1
    path, config = Path(model.vae.path or ""), network_config(model.vae)
    if config is None and path.is_file():
        config = vae_config({name: row.shape for name, row in contents_of(path)[0].items()})
    if config is None:
        raise ValueError("its size is unknown")
    return config.get("latent_channels", 4), 2 ** (len(config["block_out_channels"]) - 1), 1


def _vision(weights: Weights) -> tuple[int, int]:
    """Return the tokens and the width of a CLIP image encoder's output."""
    if (config := network_config(weights)) is not None:
        config |= config.get("vision_config") or {}
        return (config["image_size"] // config["patch_size"]) ** 2 + 1, config["hidden_size"]
    for name, tensor in _tensors(weights).items():
        if _VISION_PLACES.match(name):
            tokens, width = tensor.shape[-2:]
            return tokens, width
    return _VISION


def _tensors(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors of a single file; none of a torch file, whose shapes are not read."""
    path = Path(weights.path or "")
    return contents_of(path)[0] if path.suffix == ".safetensors" else {}


# -- embeddings -----------------------------------------------------------------------------------


def text_tensors(model: Model, tokens: Sequence[int]) -> Tensors:
    """Return the tensors of an embedding.

    `tokens` has the number of tokens of each text encoder, see `lengths`.
    """
    if not model.spec.encodes:
        return _programs_text(model)
    layout, dtype, tensors = layout_of(model.layout_name), model.caption_dtype, Tensors()
    for number, (weights, count) in enumerate(zip(model.text, tokens, strict=True)):
        width = text_width(weights)
        if width is None and layout.has_frames:
            width = embedding_width(_tensors(weights)) or _UMT5
        if not width:
            raise ValueError("its size is unknown")
        name = encoder_name(number)
        tensors[hidden_state(number)] = dtype, (count, width)
        if pooled := _pooled_width(model, number):
            tensors[f"{name}.pooled"] = dtype, (pooled,)
        tensors[f"{name}.attention_mask"] = "int64", (count,)
    if layout.has_frames:
        return {f"varlen_t5_{dtype}": tensors[hidden_state(0)]}
    if layout.npz:
        return {
            name: _text_array(tensors, part, numbers)
            for name, (part, numbers) in model.spec.strategies.text_arrays.items()
        }
    if model.spec.text_encoders:
        return tensors
    return {name: row for name, row in tensors.items() if not name.endswith("attention_mask")}


def _programs_text(model: Model) -> Tensors:
    """Return the tensors that a program writes for any caption."""
    other = model.text_dtype or any("length" in argument for argument in model.text_arguments)
    if other or not model.spec.cached_text:
        raise ValueError("its size is unknown")
    cached = model.spec.cached_text.items()
    return {name: (str(dtype), tuple(map(int, shape))) for name, (dtype, *shape) in cached}


def _text_array(tensors: Tensors, part: str, numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return an array of sd-scripts' embeddings, see `Strategies.text_arrays`."""
    if part == "applied":
        return "bool", ()
    if part == "places":
        return "float32", (*tensors[f"{encoder_name(numbers[0])}.attention_mask"][1], 3)
    several = [tensors[f"{encoder_name(number)}.{part}"] for number in numbers]
    dtype, (*before, _) = several[0]
    dtype = "float32" if dtype == "bfloat16" else dtype
    return dtype, (*before, sum(shape[-1] for _, shape in several))


def _pooled_width(model: Model, number: int) -> int:
    """Return the width of the caption's vector that a text encoder's cache keeps; 0 for none."""
    config, clips = text_config(model.text[number]) or {}, model.spec.clips
    projects = "CLIPTextModelWithProjection" in (config.get("architectures") or ())
    if number < len(clips):
        pooled = clips[number].pooled
        projects = pooled != "bare" and (clips[number].projects or projects)
    else:
        is_clip = "clip" in str(config.get("model_type"))
        pooled = "own" if is_clip and not model.spec.text_encoders else None
    return int(config["projection_dim" if projects else "hidden_size"]) if pooled else 0


# -- tokens ---------------------------------------------------------------------------------------


def lengths(model: Model, captions: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the number of tokens in the embedding of each caption, for each text encoder.

    Special tokens and padding are included. It is unknown if a tokenizer is needed, and no
    `tokenizer.json` of it is on this disk.
    """
    if not model.spec.encodes:
        return [() for _ in captions]
    columns = list[Sequence[int]]()
    chunks: Sequence[int] | None = None
    for number, weights in enumerate(model.text):
        kind = model.spec.text_encoders[number] if model.spec.text_encoders else ""
        if "CLIP" in kind:
            chunks = chunks or _chunks(model, captions)
            columns.append([_CHUNK * count + 2 for count in chunks])
            continue
        if (own := _limit(model, kind, weights)) is None:
            raise ValueError("its length is unknown")
        limit, is_fixed = own
        if is_fixed:
            columns.append([limit] * len(captions))
        else:
            counts = counted_tokens(weights, captions, cleaned=model.spec.cleans_captions)
            columns.append([min(count + _T5_SPECIAL, limit) for count in counts])
    return [*zip(*columns, strict=True)]


def _limit(model: Model, kind: str, weights: TextWeights) -> tuple[int, bool] | None:
    """Return the most tokens of an encoder, and whether all embeddings have so many; see `files`.

    `kind` is that of the architecture; "" for another encoder.
    """
    if not kind:
        return text_tokens(weights)
    limit = weights.max_length or T5_LENGTH
    pads = layout_of(model.layout_name).like_sdscripts
    return (limit, pads) if kind == "T5" else (min(limit, T5_LENGTH), False)


def _chunks(model: Model, captions: Sequence[str]) -> Sequence[int]:
    """Return the number of CLIP's chunks of each caption."""
    length = model.max_token_length
    if isinstance(length, int):
        return [max(1, math.ceil(length / _CHUNK))] * len(captions)
    clips = (weights for weights, _ in zip(model.text, model.spec.clips, strict=False))
    counts = [counted_tokens(weights, captions) for weights in clips]
    return [max(1, math.ceil(max(several) / _CHUNK)) for several in zip(*counts, strict=True)]


def counted_tokens(
    weights: TextWeights, captions: Sequence[str], *, cleaned: bool = False
) -> list[int]:
    """Return the number of each caption's tokens, without special tokens and padding.

    With `cleaned`, HTML and repeated space are removed first, as for umT5.

    Raises:
        ModelError: there is no tokenizer.
        ValueError: the tokenizer is not on this disk, has no `tokenizer.json`, or is damaged.
    """
    if weights.hub is not None or (weights.tokenizer is not None and weights.tokenizer.hub):
        raise ValueError("the tokenizer is on the hub")
    first = tokenizer_files(weights)[0]
    if first.name != "tokenizer.json":
        raise ValueError("there is no tokenizer.json")
    texts = [" ".join(caption.split()) for caption in captions] if cleaned else [*captions]
    try:
        encodings = _tokenizer(first).encode_batch(texts, add_special_tokens=False)
    except Exception as error:  # the library raises no other type for a damaged file
        raise ValueError(f"the tokenizer is damaged: {error}") from None
    return [len(encoding.ids) for encoding in encodings]


@lru_cache(4)
def _tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # loads in a twentieth of the time of transformers

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# -- files ----------------------------------------------------------------------------------------


def file_bytes(layout: Layout, tensors: Tensors, metadata: Mapping[str, str]) -> int:
    """Return the bytes of a cache file with some tensors and metadata."""
    sizes = {
        name: _BYTES.get(dtype, _NUMBER) * math.prod(shape)
        for name, (dtype, shape) in tensors.items()
    }
    if layout.npz:
        return sum(sizes.values()) + _npz_frame(tensors, metadata)
    entries, end = dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + sizes[name]
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    return len(head_of(entries, metadata)) + end


def _npz_frame(names: Collection[str], metadata: Mapping[str, str]) -> int:
    """Return the bytes of an npz file besides its arrays."""
    comment = json.dumps(filled(metadata, ()), separators=(",", ":"))
    return sum(_NPZ_MEMBER + 2 * len(f"{name}.npy") for name in names) + _NPZ_END + len(comment)
