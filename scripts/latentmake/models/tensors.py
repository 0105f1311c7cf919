"""Names and shapes of the tensors of a network, as its configuration implies them.

Sources: diffusers' UNet2DConditionModel, AutoencoderKL and WanTransformer3DModel; transformers'
CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel and UMT5EncoderModel. Configurations with
other blocks, or with keys that add layers, are not supported. A damaged configuration raises a
LookupError, a TypeError or a ValueError. The planner uses this module, so it avoids the libraries
themselves: they import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from latentmake.formats.safetensors import Tensor

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]
_Entries = Iterator[tuple[str, tuple[int, ...]]]

# Keys of a UNet2DConditionModel that can add or change layers -> values that do not.
_PLAIN: Mapping[str, Sequence[object]] = {
    "addition_embed_type": (None, "text_time"),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "time_embedding_type": (None, "positional"),
    **dict.fromkeys(("attention_type", "resnet_time_scale_shift"), (None, "default")),
    **dict.fromkeys(("conv_in_kernel", "conv_out_kernel"), (None, 3)),
    **dict.fromkeys(("dual_cross_attention", "only_cross_attention"), (None, False)),
    "mid_block_only_cross_attention": (None, False),
    **dict.fromkeys(("class_embed_type", "num_class_embeds", "cross_attention_norm"), (None,)),
    **dict.fromkeys(("encoder_hid_dim", "encoder_hid_dim_type", "timestep_post_act"), (None,)),
    **dict.fromkeys(("time_cond_proj_dim", "time_embedding_dim"), (None,)),
    "reverse_transformer_layers_per_block": (None,),
}
# Type of a block -> whether it has cross-attention.
_ATTENDS = {
    **{"CrossAttnDownBlock2D": True, "DownBlock2D": False},
    **{"CrossAttnUpBlock2D": True, "UpBlock2D": False},
}


def unet(config: Config) -> Shapes | None:
    """Return the tensors of a UNet2DConditionModel; None if its configuration is not supported."""
    if any(config.get(key, plain[0]) not in plain for key, plain in _PLAIN.items()):
        return None
    types = (*config["down_block_types"], *config["up_block_types"])
    return dict(_unet(config)) if {*types} <= _ATTENDS.keys() else None


def _unet(config: Config) -> _Entries:
    channels, count = [*config["block_out_channels"]], len(config["block_out_channels"])
    first, time = channels[0], 4 * channels[0]
    layers = _per_block(config.get("layers_per_block", 2), count)
    depths = _per_block(config.get("transformer_layers_per_block", 1), count)
    widths = _per_block(config.get("cross_attention_dim", 1280), count)
    linear = bool(config.get("use_linear_projection"))

    def block(place: str, attends: bool, index: int, sizes: Sequence[tuple[int, int]]) -> _Entries:
        for number, (inner, outer) in enumerate(sizes):
            yield from _resnet(f"{place}.resnets.{number}", inner, outer, time)
            if attends:
                shape = (outer, widths[index], depths[index], linear)
                yield from _transformer(f"{place}.attentions.{number}", *shape)

    yield from _layer("conv_in", first, config.get("in_channels", 4), 3, 3)
    yield from _layer("time_embedding.linear_1", time, first)
    yield from _layer("time_embedding.linear_2", time, time)
    if config.get("addition_embed_type"):
        vector = config["projection_class_embeddings_input_dim"]
        yield from _layer("add_embedding.linear_1", time, vector)
        yield from _layer("add_embedding.linear_2", time, time)
    for index, (kind, outer) in enumerate(zip(config["down_block_types"], channels, strict=True)):
        inner, place = channels[max(index - 1, 0)], f"down_blocks.{index}"
        sizes = [(outer if number else inner, outer) for number in range(layers[index])]
        yield from block(place, _ATTENDS[kind], index, sizes)
        if index < count - 1:
            yield from _layer(f"{place}.downsamplers.0.conv", outer, outer, 3, 3)
    last = channels[-1]
    yield from _resnet("mid_block.resnets.0", last, last, time)
    yield from _transformer("mid_block.attentions.0", last, widths[-1], depths[-1], linear)
    yield from _resnet("mid_block.resnets.1", last, last, time)
    # Each layer of the up blocks also gets the output of a down layer, in reverse order.
    skips = [first]
    for index, outer in enumerate(channels):
        skips += [outer] * (layers[index] + (index < count - 1))
    before = last
    for number, kind in enumerate(config["up_block_types"]):
        index, place = count - 1 - number, f"up_blocks.{number}"
        outer, sizes = channels[index], []
        for _ in range(layers[index] + 1):
            sizes.append((before + skips.pop(), outer))
            before = outer
        yield from block(place, _ATTENDS[kind], index, sizes)
        if index:
            yield from _layer(f"{place}.upsamplers.0.conv", outer, outer, 3, 3)
    yield from _layer("conv_norm_out", first)
    yield from _layer("conv_out", config.get("out_channels", 4), first, 3, 3)


FLUX2_VAE = "AutoencoderKLFlux2"
"""Class of FLUX.2's VAE: an AutoencoderKL with `STATISTICS` of latents for FLUX.2's own network."""
STATISTICS = "bn."
"""Prefix of these statistics' names."""

# Names of attention layers in old files of diffusers -> present names.
_ANCIENT = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def vae_layer(name: str) -> str:
    """Convert a tensor's name in FLUX.2's VAE or in an older file to its name in AutoencoderKL."""
    name = re.sub(r"^(encoder|decoder)\.((post_)?quant_conv\.)", r"\2", name)
    attention, current = r"(attentions\.\d+)\.(\w+)", _ANCIENT.get
    return re.sub(attention, lambda match: f"{match[1]}.{current(match[2], match[2])}", name)


def vae(config: Config) -> Shapes | None:
    """Return the tensors of an AutoencoderKL; None if its configuration is not supported."""
    types = {*config["down_block_types"], *config["up_block_types"]}
    if types != {"DownEncoderBlock2D", "UpDecoderBlock2D"}:
        return None
    return dict(_vae(config))


def _vae(config: Config) -> _Entries:
    channels, layers = [*config["block_out_channels"]], config.get("layers_per_block", 1)
    latents, last = config.get("latent_channels", 4), channels[-1]

    def middle(half: str) -> _Entries:
        for number in (0, 1):
            yield from _resnet(f"{half}.mid_block.resnets.{number}", last, last)
        if config.get("mid_block_add_attention", True):
            place = f"{half}.mid_block.attentions.0"
            yield from _layer(f"{place}.group_norm", last)
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _layer(f"{place}.{name}", last, last)

    def blocks(place: str, sizes: Sequence[int], depth: int, sampler: str) -> _Entries:
        inner = sizes[0]
        for index, outer in enumerate(sizes):
            for number in range(depth):
                yield from _resnet(f"{place}.{index}.resnets.{number}", inner, outer)
                inner = outer
            if index < len(sizes) - 1:
                yield from _layer(f"{place}.{index}.{sampler}.0.conv", outer, outer, 3, 3)

    yield from _layer("encoder.conv_in", channels[0], config.get("in_channels", 3), 3, 3)
    yield from blocks("encoder.down_blocks", channels, layers, "downsamplers")
    yield from middle("encoder")
    yield from _layer("encoder.conv_norm_out", last)
    yield from _layer("encoder.conv_out", 2 * latents, last, 3, 3)
    channels = [*(config.get("decoder_block_out_channels") or channels)]
    last = channels[-1]
    yield from _layer("decoder.conv_in", last, latents, 3, 3)
    yield from middle("decoder")
    yield from blocks("decoder.up_blocks", channels[::-1], layers + 1, "upsamplers")
    yield from _layer("decoder.conv_norm_out", channels[0])
    yield from _layer("decoder.conv_out", config.get("out_channels", 3), channels[0], 3, 3)
    if config.get("use_quant_conv", True):
        yield from _layer("quant_conv", 2 * latents, 2 * latents, 1, 1)
    if config.get("use_post_quant_conv", True):
        yield from _layer("post_quant_conv", latents, latents, 1, 1)


def clip(config: Config, *, projects: bool) -> _Entries:
    """Yield the tensors of a CLIP text encoder; names omit the prefix `text_model.`."""
    width, inner = config.get("hidden_size", 512), config.get("intermediate_size", 2048)
    places = config.get("max_position_embeddings", 77)
    yield "embeddings.token_embedding.weight", (config.get("vocab_size", 49408), width)
    yield "embeddings.position_embedding.weight", (places, width)
    for number in range(config.get("num_hidden_layers", 12)):
        place = f"encoder.layers.{number}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _layer(f"{place}.self_attn.{name}", width, width)
        yield from _layer(f"{place}.layer_norm1", width)
        yield from _layer(f"{place}.mlp.fc1", inner, width)
        yield from _layer(f"{place}.mlp.fc2", width, inner)
        yield from _layer(f"{place}.layer_norm2", width)
    yield from _layer("final_layer_norm", width)
    if projects:
        yield "text_projection.weight", (config.get("projection_dim", 512), width)


def t5(config: Config, *, every_bias: bool) -> _Entries:
    """Yield the tensors of the encoder of a T5 or umT5.

    With `every_bias` (umT5), every block has a relative attention bias; otherwise only the first.
    """
    width, inner, heads = config["d_model"], config["d_ff"], config["num_heads"]
    joined, gated = heads * config["d_kv"], "gated" in config.get("feed_forward_proj", "relu")
    yield "shared.weight", (config["vocab_size"], width)
    for number in range(config["num_layers"]):
        place = f"encoder.block.{number}.layer"
        for name in "qkv":
            yield f"{place}.0.SelfAttention.{name}.weight", (joined, width)
        yield f"{place}.0.SelfAttention.o.weight", (width, joined)
        if every_bias or not number:
            shape = (config.get("relative_attention_num_buckets", 32), heads)
            yield f"{place}.0.SelfAttention.relative_attention_bias.weight", shape
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            yield f"{place}.1.DenseReluDense.{name}.weight", (inner, width)
        yield f"{place}.1.DenseReluDense.wo.weight", (width, inner)
        for layer in (0, 1):
            yield f"{place}.{layer}.layer_norm.weight", (width,)
    yield "encoder.final_layer_norm.weight", (width,)


def wan_dit(config: Config) -> _Entries:
    """Yield the tensors of a WanTransformer3DModel."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch, image = tuple(config["patch_size"]), config.get("image_dim")
    embedder = "condition_embedder"
    yield "scale_shift_table", (1, 2, width)
    yield "patch_embedding.weight", (width, config["in_channels"], *patch)
    yield "patch_embedding.bias", (width,)
    for name, inner in (("time", config["freq_dim"]), ("text", config["text_dim"])):
        yield from _layer(f"{embedder}.{name}_embedder.linear_1", width, inner)
        yield from _layer(f"{embedder}.{name}_embedder.linear_2", width, width)
    yield from _layer(f"{embedder}.time_proj", 6 * width, width)
    if image is not None:
        place = f"{embedder}.image_embedder"
        if config.get("pos_embed_seq_len") is not None:
            yield f"{place}.pos_embed", (1, config["pos_embed_seq_len"], image)
        yield from _layer(f"{place}.norm1", image)
        yield from _layer(f"{place}.ff.net.0.proj", image, image)
        yield from _layer(f"{place}.ff.net.2", width, image)
        yield from _layer(f"{place}.norm2", width)
    for number in range(config["num_layers"]):
        place = f"blocks.{number}"
        yield f"{place}.scale_shift_table", (1, 6, width)
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _layer(f"{place}.{attention}.{name}", width, width)
            for name in ("norm_q", "norm_k"):
                yield f"{place}.{attention}.{name}.weight", (width,)
        if image is not None:
            yield from _layer(f"{place}.attn2.add_k_proj", width, width)
            yield from _layer(f"{place}.attn2.add_v_proj", width, width)
            yield f"{place}.attn2.norm_added_k.weight", (width,)
        yield from _layer(f"{place}.norm2", width)
        yield from _layer(f"{place}.ffn.net.0.proj", config["ffn_dim"], width)
        yield from _layer(f"{place}.ffn.net.2", width, config["ffn_dim"])
    area = patch[0] * patch[1] * patch[2]
    yield from _layer("proj_out", area * config["out_channels"], width)


def wan_vae(config: Config) -> Iterator[str]:
    """Yield the names of the tensors of an AutoencoderKLWan; they do not depend on its width.

    An empty configuration stands for Wan 2.1's release. Configurations with residual blocks (Wan
    2.2's 5B), or with attention outside the middle block, are not supported and yield no names.
    """
    if config.get("is_residual") or config.get("attn_scales"):
        return
    sizes, depth = [*config.get("dim_mult", (1, 2, 4, 4))], config.get("num_res_blocks", 2)
    times = [*config.get("temperal_downsample", (False, True, True))]
    last, layers = len(sizes) - 1, ["quant_conv", "post_quant_conv"]

    def add(place: str, *names: str) -> None:
        layers.extend(f"{place}.{name}" for name in names)

    for half in ("encoder", "decoder"):
        add(half, "conv_in", "conv_out", "norm_out")
        add(f"{half}.mid_block.attentions.0", "to_qkv", "proj", "norm")
        for number in (0, 1):
            add(f"{half}.mid_block.resnets.{number}", *_WAN_LAYERS)
    # The encoder numbers its blocks and samplers in one list.
    for index, (before, size) in enumerate(zip((1, *sizes), sizes, strict=False)):
        first = index * (depth + 1)
        for number in range(depth):
            shortcut = ["conv_shortcut"] if not number and before != size else []
            add(f"encoder.down_blocks.{first + number}", *_WAN_LAYERS, *shortcut)
        if index < last:
            in_time = ["time_conv"] if times[index] else []
            add(f"encoder.down_blocks.{first + depth}", "resample.1", *in_time)
    # The decoder's samplers halve the width.
    sizes, times = sizes[::-1], times[::-1]
    for index, (before, size) in enumerate(zip((sizes[0], *sizes), sizes, strict=False)):
        place, widens = f"decoder.up_blocks.{index}", before != size * (2 if index else 1)
        for number in range(depth + 1):
            shortcut = ["conv_shortcut"] if not number and widens else []
            add(f"{place}.resnets.{number}", *_WAN_LAYERS, *shortcut)
        if index < last:
            in_time = ["time_conv"] if times[index] else []
            add(f"{place}.upsamplers.0", "resample.1", *in_time)
    for layer in layers:
        ends = ("gamma",) if ".norm" in layer else ("weight", "bias")
        yield from (f"{layer}.{end}" for end in ends)


_WAN_LAYERS = ("conv1", "conv2", "norm1", "norm2")  # layers of a ResNet block
_WAN_RESNET = {
    **{"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3"},
    **{"conv2": "residual.6", "conv_shortcut": "shortcut"},
}
_WAN_OUTSIDE = {
    **{"quant_conv": "conv1", "post_quant_conv": "conv2"},
    **{f"{half}.conv_in": f"{half}.conv1" for half in ("encoder", "decoder")},
    **{f"{half}.norm_out": f"{half}.head.0" for half in ("encoder", "decoder")},
    **{f"{half}.conv_out": f"{half}.head.2" for half in ("encoder", "decoder")},
}


def original_wan_vae(name: str) -> str:
    """Convert a tensor's name in diffusers to its name in Wan's release, for the VAE."""
    layer, _, end = name.rpartition(".")
    place, _, inner = layer.rpartition(".")
    layer = _WAN_OUTSIDE.get(layer, f"{place}.{_WAN_RESNET.get(inner, inner)}")
    layer = layer.replace("mid_block.attentions.0", "middle.1")
    layer = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"middle.{2 * int(match[1])}", layer)
    layer = layer.replace("down_blocks", "downsamples")

    def block(match: re.Match[str]) -> str:
        inside = int(match[3]) if match[2] == "resnets" else 3
        return f"upsamples.{4 * int(match[1]) + inside}"

    layer = re.sub(r"up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)", block, layer)
    return f"{layer}.{end}"


T5 = {
    "^shared.": "token_embedding.",
    "^encoder.final_layer_norm.": "norm.",
    "^encoder.block.": "blocks.",
    ".layer.0.layer_norm.": ".norm1.",
    ".layer.1.layer_norm.": ".norm2.",
    ".layer.0.SelfAttention.relative_attention_bias.": ".pos_embedding.embedding.",
    ".layer.0.SelfAttention.": ".attn.",
    ".layer.1.DenseReluDense.wi_0.": ".ffn.gate.0.",
    ".layer.1.DenseReluDense.wi_1.": ".ffn.fc1.",
    ".layer.1.DenseReluDense.wo.": ".ffn.fc2.",
}
"""Part of umT5's tensor names in transformers (^: start of the name) -> part in Wan's release."""


def original_t5(name: str) -> str:
    """Convert a tensor's name in transformers to its name in Wan's release, for umT5."""
    return replaced(name, {part.replace(".", r"\."): other for part, other in T5.items()})


FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
"""Names of 8-bit number formats in safetensors."""
# "" stands for a tensor of a torch file, whose number format is not read.
_NUMBERS = frozenset({"", "BF16", "F16", "F32", "F64"})


def misfit(
    expected: Shapes, held: Mapping[str, Tensor], *, strict: bool = False, fp8: bool = False
) -> str:
    """Return the reason why tensors do not fit a network; "" if they fit.

    Args:
        expected: tensors of the network.
        held: tensors of its files, with the same naming.
        strict: whether further tensors are a fault.
        fp8: whether the tensors may be in 8 bits.
    """
    odd, numbers = [], _NUMBERS | FP8 if fp8 else _NUMBERS
    for name in filter(held.__contains__, expected):
        (dtype, shape, *_), wanted = held[name], expected[name]
        if dtype and _flat(shape) != _flat(wanted):
            odd.append(f"has {name} of shape {[*shape]} instead of {[*wanted]}")
        elif dtype not in numbers:
            form = "fp8" if dtype in FP8 else dtype
            odd.append(f"holds {name} in {form}, not in bf16, fp16 or float32")
    missing = (name for name in expected if name not in held)
    return faults(missing, (name for name in held if strict and name not in expected), odd)


def _flat(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop the axes of length 1 at the end of a shape.

    Some files store a linear layer as a convolution of one pixel, or the reverse.
    """
    sides = tuple(shape)
    while len(sides) > 2 and sides[-1] == 1:
        sides = sides[:-1]
    return sides


def faults(missing: Iterable[str], unknown: Iterable[str] = (), others: Iterable[str] = ()) -> str:
    """Describe the first fault of a network's tensors, and count the others; "" if there is none.

    Args:
        missing: names that the network's files lack.
        unknown: names that the network does not have.
        others: further faults, in words.
    """
    texts = [
        *(f"lacks {name}" for name in missing if not name.endswith("position_ids")),
        *(f"holds {name}, which it should not" for name in unknown),
        *others,
    ]
    more = f", and {len(texts) - 1} faults more" if len(texts) > 1 else ""
    return f"{texts[0]}{more}" if texts else ""


# -- layers ---------------------------------------------------------------------------------------


def _per_block(value: Any, count: int) -> list[Any]:
    """Return one value for each block; a single value applies to all blocks."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"has {len(values)} values for {count} blocks")
    return values


def _layer(name: str, *shape: int) -> _Entries:
    """Yield the tensors of a layer with a bias; `shape` is that of its weight, outputs first."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _resnet(name: str, inner: int, outer: int, time: int = 0) -> _Entries:
    yield from _layer(f"{name}.norm1", inner)
    yield from _layer(f"{name}.conv1", outer, inner, 3, 3)
    if time:
        yield from _layer(f"{name}.time_emb_proj", outer, time)
    yield from _layer(f"{name}.norm2", outer)
    yield from _layer(f"{name}.conv2", outer, outer, 3, 3)
    if inner != outer:
        yield from _layer(f"{name}.conv_shortcut", outer, inner, 1, 1)


def _transformer(name: str, width: int, text: int, depth: int, linear: bool) -> _Entries:
    """Yield the tensors of a Transformer2DModel with `depth` blocks that attend to a text."""
    yield from _layer(f"{name}.norm", width)
    kernel = () if linear else (1, 1)
    yield from _layer(f"{name}.proj_in", width, width, *kernel)
    yield from _layer(f"{name}.proj_out", width, width, *kernel)
    for number in range(depth):
        place = f"{name}.transformer_blocks.{number}"
        for attention, inner in (("attn1", width), ("attn2", text)):
            yield f"{place}.{attention}.to_q.weight", (width, width)
            yield f"{place}.{attention}.to_k.weight", (width, inner)
            yield f"{place}.{attention}.to_v.weight", (width, inner)
            yield from _layer(f"{place}.{attention}.to_out.0", width, width)
        for layer in ("norm1", "norm2", "norm3"):
            yield from _layer(f"{place}.{layer}", width)
        yield from _layer(f"{place}.ff.net.0.proj", 8 * width, width)
        yield from _layer(f"{place}.ff.net.2", width, 4 * width)


# -- original names -------------------------------------------------------------------------------

# Names in diffusers -> names in the original releases (LDM). Sources: sd-scripts'
# `make_unet_conversion_map`, diffusers' `convert_ldm_vae_checkpoint`.
_OUTSIDE = {
    **{"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"},
    **{"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"},
    **{"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"},
}
_INSIDE = {
    r"mid_block\.attentions\.0\b": "middle_block.1",
    r"mid_block\.resnets\.0\b": "middle_block.0",
    r"mid_block\.resnets\.1\b": "middle_block.2",
}
_RESNET = {
    **{"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1"},
    **{"norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"},
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)")


def original_unet_layer(layer: str, config: Config) -> str:
    """Convert a UNet layer's name in diffusers to its name in the original release."""
    if layer in _OUTSIDE:
        return _OUTSIDE[layer]
    layers = config.get("layers_per_block", 2)

    def block(match: re.Match[str]) -> str:
        half, number, part, index = match[1], int(match[2]), match[3], int(match[4])
        attends = half == "up" and _ATTENDS[config["up_block_types"][number]]
        places = {"resnets": (0, 0), "attentions": (0, 1)}
        places |= {"downsamplers": (layers, 0), "upsamplers": (layers, 1 + attends)}
        (offset, inner), first = places[part], int(half == "down")
        at = first + number * (layers + 1) + index + offset
        return f"{'input' if first else 'output'}_blocks.{at}.{inner}"

    layer = re.sub(r"downsamplers\.0\.conv$", "downsamplers.0.op", layer)
    if ".resnets." in layer:
        place, _, name = layer.rpartition(".")
        layer = f"{place}.{_RESNET.get(name, name)}"
    return replaced(_BLOCK.sub(block, layer), _INSIDE)


_VAE = {
    r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)": r"encoder.down.\1.block.\2",
    r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0": r"encoder.down.\1.downsample",
    r"\.mid_block\.resnets\.0": ".mid.block_1",
    r"\.mid_block\.resnets\.1": ".mid.block_2",
    r"\.mid_block\.attentions\.0": ".mid.attn_1",
    r"\.group_norm$": ".norm",
    r"\.to_([qkv])$": r".\1",
    r"\.to_out\.0$": ".proj_out",
    r"\.conv_shortcut$": ".nin_shortcut",
    r"\.conv_norm_out$": ".norm_out",
}


def original_vae_layer(layer: str, config: Config) -> str:
    """Convert a VAE layer's name in diffusers to its name in the original release."""
    last = len(config["block_out_channels"]) - 1
    places = {"resnets": r"block.\3", "upsamplers": "upsample"}
    layer = re.sub(
        r"^decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)",
        lambda match: f"decoder.up.{last - int(match[1])}.{match.expand(places[match[2]])}",
        layer,
    )
    return replaced(layer, _VAE)


def open_clip(shapes: Shapes) -> Shapes:
    """Convert the tensors of a CLIP from the names and shapes of transformers to OpenCLIP's.

    OpenCLIP joins the three projections of an attention, and transposes the text projection.
    """
    converted: Shapes = {}
    for name, shape in shapes.items():
        if match := re.match(r"(encoder\.layers\.\d+)\.self_attn\.[kvq]_proj\.(\w+)", name):
            place = match[1].replace("encoder.layers", "transformer.resblocks")
            converted[f"{place}.attn.in_proj_{match[2]}"] = (3 * shape[0], *shape[1:])
            continue
        name = replaced(name, _OPEN_CLIP)
        converted[name] = shape[::-1] if name == "text_projection" else shape
    return converted


_OPEN_CLIP = {
    r"^encoder\.layers\.": "transformer.resblocks.",
    r"\.self_attn\.out_proj\.": ".attn.out_proj.",
    r"\.layer_norm(\d)\.": r".ln_\1.",
    r"\.mlp\.fc1\.": ".mlp.c_fc.",
    r"\.mlp\.fc2\.": ".mlp.c_proj.",
    r"^embeddings\.token_embedding\.": "token_embedding.",
    r"^embeddings\.position_embedding\.weight": "positional_embedding",
    r"^final_layer_norm\.": "ln_final.",
    r"^text_projection\.weight": "text_projection",
}


def blocks_in(names: Iterable[str], pattern: str) -> int:
    """Return the number of blocks, counted by names; group 1 of `pattern` is a block's number."""
    matches = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def replaced(name: str, patterns: Mapping[str, str]) -> str:
    """Replace patterns in a name, one after the other."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def renamed(shapes: Shapes, layer_name: Callable[[str, Config], str], config: Config) -> Shapes:
    """Return the tensors with the names that `layer_name` gives to their layers."""
    result: Shapes = {}
    for name, shape in shapes.items():
        layer, _, end = name.rpartition(".")
        result[f"{layer_name(layer, config)}.{end}"] = shape
    return result
