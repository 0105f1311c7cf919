"""Names and shapes of the tensors of a network, as its configuration implies them.

Sources: diffusers' UNet2DConditionModel and AutoencoderKL, transformers' CLIPTextModel,
CLIPTextModelWithProjection, T5EncoderModel and UMT5EncoderModel, and diffusers'
WanTransformer3DModel. A configuration that names other blocks, or keys that add layers, implies
nothing here; a damaged one is a LookupError, a TypeError or a ValueError. Planning reads headers
alone, so no library that imports torch is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from latentmake.files.safetensors import Tensor

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]
_Entries = Iterator[tuple[str, tuple[int, ...]]]

# Keys of a UNet2DConditionModel that add or change layers -> values that add none.
_PLAIN: Mapping[str, Sequence[object]] = {
    "addition_embed_type": (None, "text_time"),
    "attention_type": (None, "default"),
    "class_embed_type": (None,),
    "conv_in_kernel": (None, 3),
    "conv_out_kernel": (None, 3),
    "cross_attention_norm": (None,),
    "dual_cross_attention": (None, False),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "num_class_embeds": (None,),
    "only_cross_attention": (None, False),
    "mid_block_only_cross_attention": (None, False),
    "resnet_time_scale_shift": (None, "default"),
    "reverse_transformer_layers_per_block": (None,),
    "time_cond_proj_dim": (None,),
    "time_embedding_dim": (None,),
    "time_embedding_type": (None, "positional"),
    "timestep_post_act": (None,),
}
_ATTENDS = {
    **{"CrossAttnDownBlock2D": True, "DownBlock2D": False},
    **{"CrossAttnUpBlock2D": True, "UpBlock2D": False},
}


def unet(config: Config) -> Shapes | None:
    """Return the tensors of a UNet2DConditionModel; None where its configuration does not tell."""
    if any(config.get(key, plain[0]) not in plain for key, plain in _PLAIN.items()):
        return None
    types = (*config["down_block_types"], *config["up_block_types"])
    return dict(_unet(config)) if {*types} <= _ATTENDS.keys() else None


def _unet(config: Config) -> _Entries:
    channels, count = [*config["block_out_channels"]], len(config["block_out_channels"])
    first, time = channels[0], 4 * channels[0]
    layers = _each(config.get("layers_per_block", 2), count)
    depths = _each(config.get("transformer_layers_per_block", 1), count)
    widths = _each(config.get("cross_attention_dim", 1280), count)
    linear = bool(config.get("use_linear_projection"))

    def block(place: str, attends: bool, index: int, sizes: Sequence[tuple[int, int]]) -> _Entries:
        for number, (inner, outer) in enumerate(sizes):
            yield from _resnet(f"{place}.resnets.{number}", inner, outer, time)
            if attends:
                shape = (outer, widths[index], depths[index], linear)
                yield from _transformer(f"{place}.attentions.{number}", *shape)

    yield from _conv("conv_in", config.get("in_channels", 4), first)
    yield from _linear("time_embedding.linear_1", first, time)
    yield from _linear("time_embedding.linear_2", time, time)
    if config.get("addition_embed_type"):
        yield from _linear(
            "add_embedding.linear_1", config["projection_class_embeddings_input_dim"], time
        )
        yield from _linear("add_embedding.linear_2", time, time)
    for index, (kind, outer) in enumerate(zip(config["down_block_types"], channels, strict=True)):
        inner, place = channels[max(index - 1, 0)], f"down_blocks.{index}"
        sizes = [(outer if number else inner, outer) for number in range(layers[index])]
        yield from block(place, _ATTENDS[kind], index, sizes)
        if index < count - 1:
            yield from _conv(f"{place}.downsamplers.0.conv", outer, outer)
    last = channels[-1]
    yield from _resnet("mid_block.resnets.0", last, last, time)
    yield from _transformer("mid_block.attentions.0", last, widths[-1], depths[-1], linear)
    yield from _resnet("mid_block.resnets.1", last, last, time)
    # On the way up each layer gets the output of one on the way down, in reverse.
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
            yield from _conv(f"{place}.upsamplers.0.conv", outer, outer)
    yield from _norm("conv_norm_out", first)
    yield from _conv("conv_out", first, config.get("out_channels", 4))


FLUX2_VAE = "AutoencoderKLFlux2"
"""Class of FLUX.2's VAE: an AutoencoderKL with `STATISTICS` of latents for FLUX.2's own network."""
STATISTICS = "bn."


_ANCIENT = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def vae_layer(name: str) -> str:
    """Return a tensor's name in AutoencoderKL, of its name in FLUX.2's VAE or in an older file."""
    name = re.sub(r"^(encoder|decoder)\.((post_)?quant_conv\.)", r"\2", name)
    attention, current = r"(attentions\.\d+)\.(\w+)", _ANCIENT.get
    return re.sub(attention, lambda x: f"{x[1]}.{current(x[2], x[2])}", name)


def vae(config: Config) -> Shapes | None:
    """Return the tensors of an AutoencoderKL; None where its configuration does not tell."""
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
            yield from _norm(f"{place}.group_norm", last)
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _linear(f"{place}.{name}", last, last)

    def blocks(place: str, sizes: Sequence[int], depth: int, sampler: str) -> _Entries:
        inner = sizes[0]
        for index, outer in enumerate(sizes):
            for number in range(depth):
                yield from _resnet(f"{place}.{index}.resnets.{number}", inner, outer)
                inner = outer
            if index < len(sizes) - 1:
                yield from _conv(f"{place}.{index}.{sampler}.0.conv", outer, outer)

    yield from _conv("encoder.conv_in", config.get("in_channels", 3), channels[0])
    yield from blocks("encoder.down_blocks", channels, layers, "downsamplers")
    yield from middle("encoder")
    yield from _norm("encoder.conv_norm_out", last)
    yield from _conv("encoder.conv_out", last, 2 * latents)
    channels = [*(config.get("decoder_block_out_channels") or channels)]
    last = channels[-1]
    yield from _conv("decoder.conv_in", latents, last)
    yield from middle("decoder")
    yield from blocks("decoder.up_blocks", channels[::-1], layers + 1, "upsamplers")
    yield from _norm("decoder.conv_norm_out", channels[0])
    yield from _conv("decoder.conv_out", channels[0], config.get("out_channels", 3))
    if config.get("use_quant_conv", True):
        yield from _conv("quant_conv", 2 * latents, 2 * latents, 1)
    if config.get("use_post_quant_conv", True):
        yield from _conv("post_quant_conv", latents, latents, 1)


def clip(config: Config, *, projects: bool) -> Shapes:
    """Return the tensors of a CLIP text encoder, without `text_model.` before their names."""
    width, inner = config.get("hidden_size", 512), config.get("intermediate_size", 2048)
    found: Shapes = {
        "embeddings.token_embedding.weight": (config.get("vocab_size", 49408), width),
        "embeddings.position_embedding.weight": (config.get("max_position_embeddings", 77), width),
    }
    for number in range(config.get("num_hidden_layers", 12)):
        place = f"encoder.layers.{number}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            found |= dict(_linear(f"{place}.self_attn.{name}", width, width))
        found |= dict(_norm(f"{place}.layer_norm1", width))
        found |= dict(_linear(f"{place}.mlp.fc1", width, inner))
        found |= dict(_linear(f"{place}.mlp.fc2", inner, width))
        found |= dict(_norm(f"{place}.layer_norm2", width))
    found |= dict(_norm("final_layer_norm", width))
    if projects:
        found["text_projection.weight"] = (config.get("projection_dim", 512), width)
    return found


def t5(config: Config, *, every_bias: bool) -> Shapes:
    """Return the tensors of the encoder of a T5; of a umT5 `every_bias` is true: each block's."""
    width, inner, heads = config["d_model"], config["d_ff"], config["num_heads"]
    joined, gated = heads * config["d_kv"], "gated" in config.get("feed_forward_proj", "relu")
    found: Shapes = {"shared.weight": (config["vocab_size"], width)}
    for number in range(config["num_layers"]):
        place = f"encoder.block.{number}.layer"
        for name in "qkv":
            found[f"{place}.0.SelfAttention.{name}.weight"] = (joined, width)
        found[f"{place}.0.SelfAttention.o.weight"] = (width, joined)
        if every_bias or not number:
            shape = (config.get("relative_attention_num_buckets", 32), heads)
            found[f"{place}.0.SelfAttention.relative_attention_bias.weight"] = shape
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            found[f"{place}.1.DenseReluDense.{name}.weight"] = (inner, width)
        found[f"{place}.1.DenseReluDense.wo.weight"] = (width, inner)
        for layer in (0, 1):
            found[f"{place}.{layer}.layer_norm.weight"] = (width,)
    return found | {"encoder.final_layer_norm.weight": (width,)}


def wan_dit(config: Config) -> Shapes:
    """Return the tensors of a WanTransformer3DModel."""
    return dict(_wan_dit(config))


def _wan_dit(config: Config) -> _Entries:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch, image = tuple(config["patch_size"]), config.get("image_dim")
    embedder = "condition_embedder"
    yield "scale_shift_table", (1, 2, width)
    yield "patch_embedding.weight", (width, config["in_channels"], *patch)
    yield "patch_embedding.bias", (width,)
    for name, inner in (("time", config["freq_dim"]), ("text", config["text_dim"])):
        yield from _linear(f"{embedder}.{name}_embedder.linear_1", inner, width)
        yield from _linear(f"{embedder}.{name}_embedder.linear_2", width, width)
    yield from _linear(f"{embedder}.time_proj", width, 6 * width)
    if image is not None:
        place = f"{embedder}.image_embedder"
        if config.get("pos_embed_seq_len") is not None:
            yield f"{place}.pos_embed", (1, config["pos_embed_seq_len"], image)
        yield from _norm(f"{place}.norm1", image)
        yield from _linear(f"{place}.ff.net.0.proj", image, image)
        yield from _linear(f"{place}.ff.net.2", image, width)
        yield from _norm(f"{place}.norm2", width)
    for number in range(config["num_layers"]):
        place = f"blocks.{number}"
        yield f"{place}.scale_shift_table", (1, 6, width)
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _linear(f"{place}.{attention}.{name}", width, width)
            for name in ("norm_q", "norm_k"):
                yield f"{place}.{attention}.{name}.weight", (width,)
        if image is not None:
            yield from _linear(f"{place}.attn2.add_k_proj", width, width)
            yield from _linear(f"{place}.attn2.add_v_proj", width, width)
            yield f"{place}.attn2.norm_added_k.weight", (width,)
        yield from _norm(f"{place}.norm2", width)
        yield from _linear(f"{place}.ffn.net.0.proj", width, config["ffn_dim"])
        yield from _linear(f"{place}.ffn.net.2", config["ffn_dim"], width)
    area = patch[0] * patch[1] * patch[2]
    yield from _linear("proj_out", width, area * config["out_channels"])


def wan_vae(config: Config) -> Iterator[str]:
    """Yield the names of the tensors of an AutoencoderKLWan, whatever its width.

    An empty configuration is that of Wan 2.1's release. One with residual blocks, as of Wan 2.2's
    5B, or with attention outside the middle implies nothing here.
    """
    if config.get("is_residual") or config.get("attn_scales"):
        return
    sizes, depth = [*config.get("dim_mult", (1, 2, 4, 4))], config.get("num_res_blocks", 2)
    times = [*config.get("temperal_downsample", (False, True, True))]
    last, layers = len(sizes) - 1, dict[str, tuple[str, ...]]()
    layers |= {"quant_conv": _WEIGHTS, "post_quant_conv": _WEIGHTS}

    def resnet(place: str, *, shortcut: bool = False) -> None:
        layers.update({f"{place}.conv{number}": _WEIGHTS for number in (1, 2)})
        layers.update(dict.fromkeys((f"{place}.norm1", f"{place}.norm2"), ("gamma",)))
        layers.update({f"{place}.conv_shortcut": _WEIGHTS} if shortcut else {})

    def sampler(place: str, *, in_time: bool) -> None:
        layers[f"{place}.resample.1"] = _WEIGHTS
        layers.update({f"{place}.time_conv": _WEIGHTS} if in_time else {})

    for half in ("encoder", "decoder"):
        layers |= {f"{half}.conv_in": _WEIGHTS, f"{half}.conv_out": _WEIGHTS}
        layers[f"{half}.norm_out"] = ("gamma",)
        layers |= {f"{half}.mid_block.attentions.0.{x}": _WEIGHTS for x in ("to_qkv", "proj")}
        layers[f"{half}.mid_block.attentions.0.norm"] = ("gamma",)
        for number in (0, 1):
            resnet(f"{half}.mid_block.resnets.{number}")
    # The encoder's blocks and samplers are one list.
    for index, (before, size) in enumerate(zip((1, *sizes), sizes, strict=False)):
        first = index * (depth + 1)
        for number in range(depth):
            resnet(f"encoder.down_blocks.{first + number}", shortcut=not number and before != size)
        if index < last:
            sampler(f"encoder.down_blocks.{first + depth}", in_time=times[index])
    # On the way up, the samplers halve the width.
    sizes, times = sizes[::-1], times[::-1]
    for index, (before, size) in enumerate(zip((sizes[0], *sizes), sizes, strict=False)):
        place, widens = f"decoder.up_blocks.{index}", before != size * (2 if index else 1)
        for number in range(depth + 1):
            resnet(f"{place}.resnets.{number}", shortcut=not number and widens)
        if index < last:
            sampler(f"{place}.upsamplers.0", in_time=times[index])
    yield from (f"{layer}.{end}" for layer, ends in layers.items() for end in ends)


_WEIGHTS = ("weight", "bias")
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
    """Return the name in Wan's release of a tensor of its VAE, of its name in diffusers."""
    layer, _, end = name.rpartition(".")
    place, _, inner = layer.rpartition(".")
    layer = _WAN_OUTSIDE.get(layer, f"{place}.{_WAN_RESNET.get(inner, inner)}")
    layer = layer.replace("mid_block.attentions.0", "middle.1")
    layer = re.sub(r"mid_block\.resnets\.(\d)", lambda x: f"middle.{2 * int(x[1])}", layer)
    layer = layer.replace("down_blocks", "downsamples")
    layer = re.sub(
        r"up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)",
        lambda x: f"upsamples.{4 * int(x[1]) + (int(x[3]) if x[2] == 'resnets' else 3)}",
        layer,
    )
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
"""Part of a name of umT5's tensors in transformers, with ^ its beginning -> in Wan's release."""


def original_t5(name: str) -> str:
    """Return the name in Wan's release of a tensor of umT5, of its name in transformers."""
    for part, other in T5.items():
        name = re.sub(part.replace(".", r"\."), other, name)
    return name


FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
"""Names in safetensors of numbers in 8 bits."""
_NUMBERS = frozenset({"", "BF16", "F16", "F32", "F64"})  # "": a torch file's header does not tell


def misfit(
    expected: Shapes, held: Mapping[str, Tensor], *, strict: bool = False, fp8: bool = False
) -> str:
    """Return why tensors are not those of a network; "" where they are.

    Args:
        expected: its tensors.
        held: those of its files, in the same names.
        strict: whether there may be no others.
        fp8: whether they may be in 8 bits.
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
    """Return a shape without the axes of length 1 at its end, of a convolution of one pixel."""
    found = tuple(shape)
    while len(found) > 2 and found[-1] == 1:
        found = found[:-1]
    return found


def faults(missing: Iterable[str], unknown: Iterable[str] = (), others: Iterable[str] = ()) -> str:
    """Return the first of some faults of a network's tensors; "" where there is none."""
    found = [
        *(f"lacks {name}" for name in missing if not name.endswith("position_ids")),
        *(f"holds {name}, which it should not" for name in unknown),
        *others,
    ]
    more = f", and {len(found) - 1} faults more" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


# -- layers ---------------------------------------------------------------------------------------


def _each(value: Any, count: int) -> list[Any]:
    """Return a value of each block, of one for all or one a block."""
    found = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(found) != count:
        raise ValueError(f"has {len(found)} values for {count} blocks")
    return found


def _linear(name: str, inner: int, outer: int) -> _Entries:
    yield f"{name}.weight", (outer, inner)
    yield f"{name}.bias", (outer,)


def _norm(name: str, width: int) -> _Entries:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _conv(name: str, inner: int, outer: int, kernel: int = 3) -> _Entries:
    yield f"{name}.weight", (outer, inner, kernel, kernel)
    yield f"{name}.bias", (outer,)


def _resnet(name: str, inner: int, outer: int, time: int = 0) -> _Entries:
    yield from _norm(f"{name}.norm1", inner)
    yield from _conv(f"{name}.conv1", inner, outer)
    if time:
        yield from _linear(f"{name}.time_emb_proj", time, outer)
    yield from _norm(f"{name}.norm2", outer)
    yield from _conv(f"{name}.conv2", outer, outer)
    if inner != outer:
        yield from _conv(f"{name}.conv_shortcut", inner, outer, 1)


def _transformer(name: str, width: int, text: int, depth: int, linear: bool) -> _Entries:
    """Yield the tensors of a Transformer2DModel of some blocks that attend to a text."""
    yield from _norm(f"{name}.norm", width)
    for layer in ("proj_in", "proj_out"):
        projection = _linear if linear else partial(_conv, kernel=1)
        yield from projection(f"{name}.{layer}", width, width)
    for number in range(depth):
        place = f"{name}.transformer_blocks.{number}"
        for attention, inner in (("attn1", width), ("attn2", text)):
            yield f"{place}.{attention}.to_q.weight", (width, width)
            yield f"{place}.{attention}.to_k.weight", (width, inner)
            yield f"{place}.{attention}.to_v.weight", (width, inner)
            yield from _linear(f"{place}.{attention}.to_out.0", width, width)
        for layer in ("norm1", "norm2", "norm3"):
            yield from _norm(f"{place}.{layer}", width)
        yield from _linear(f"{place}.ff.net.0.proj", width, 8 * width)
        yield from _linear(f"{place}.ff.net.2", 4 * width, width)


# -- original names -------------------------------------------------------------------------------

# Names of diffusers -> those of the original releases (LDM). Sources: sd-scripts'
# `make_unet_conversion_map`, diffusers' `convert_ldm_vae_checkpoint`.
_OUTSIDE = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_INSIDE = {
    r"mid_block\.attentions\.0\b": "middle_block.1",
    r"mid_block\.resnets\.0\b": "middle_block.0",
    r"mid_block\.resnets\.1\b": "middle_block.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)")


def original_unet_layer(layer: str, config: Config) -> str:
    """Return the name in the original release of a layer of a UNet, of its name in diffusers."""
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
    layer = _BLOCK.sub(block, layer)
    for pattern, name in _INSIDE.items():
        layer = re.sub(pattern, name, layer)
    return layer


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
    """Return the name in the original release of a layer of a VAE, of its name in diffusers."""
    last = len(config["block_out_channels"]) - 1
    places = {"resnets": r"block.\3", "upsamplers": "upsample"}
    layer = re.sub(
        r"^decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)",
        lambda x: f"decoder.up.{last - int(x[1])}.{x.expand(places[x[2]])}",
        layer,
    )
    for pattern, name in _VAE.items():
        layer = re.sub(pattern, name, layer)
    return layer


def open_clip(shapes: Shapes) -> Shapes:
    """Return the tensors of a CLIP as OpenCLIP names them, of those of transformers."""
    found: Shapes = {}
    for name, shape in shapes.items():
        if match := re.match(r"(encoder\.layers\.\d+)\.self_attn\.[kvq]_proj\.(\w+)", name):
            place = match[1].replace("encoder.layers", "transformer.resblocks")
            found[f"{place}.attn.in_proj_{match[2]}"] = (3 * shape[0], *shape[1:])
            continue
        for pattern, other in _OPEN_CLIP.items():
            name = re.sub(pattern, other, name)
        found[name] = shape[::-1] if name == "text_projection" else shape
    return found


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


def renamed(shapes: Shapes, layer_name: Callable[[str, Config], str], config: Config) -> Shapes:
    """Return tensors whose layers have other names."""
    found: Shapes = {}
    for name, shape in shapes.items():
        layer, _, end = name.rpartition(".")
        found[f"{layer_name(layer, config)}.{end}"] = shape
    return found
