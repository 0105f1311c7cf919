"""Complete checkpoints: one file with VAE, text encoders and UNet, like the files on Civitai.

Their tensors have the names of the original releases of Stable Diffusion (LDM). The configuration
of a part is inferred from shapes; values that shapes do not determine are those of the published
models of Stable Diffusion 1.x, 2.x and XL. A checkpoint that is damaged, lacks a part or has other
shapes raises a ModelError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from latentmake.base import digest
from latentmake.base.errors import ModelError
from latentmake.config.weights import Weights, known_commit, place_of, snapshots
from latentmake.formats.safetensors import Tensor
from latentmake.models.headers import contents_of
from latentmake.models.tensors import blocks_in

_FIRST, _OPEN, _XL = "cond_stage_model.transformer.", "cond_stage_model.model.", "conditioner."

# Folder of a part in a pipeline -> the part in words, and possible prefixes of its tensors; a file
# uses one of them.
_PARTS = {
    "vae": ("VAE", ("first_stage_model.",)),
    "unet": ("UNet", ("model.diffusion_model.",)),
    "text_encoder": ("text encoder", (_FIRST, _OPEN, f"{_XL}embedders.0.transformer.")),
    "text_encoder_2": ("second text encoder", (f"{_XL}embedders.1.model.",)),
}
_RELEASES = {"sd1": _FIRST, "sd2": _OPEN, "sdxl": _XL}
_TITLES = {"sd1": "Stable Diffusion 1.x", "sd2": "Stable Diffusion 2.x", "sdxl": "SDXL"}
_UNUSED_BLOCK = "transformer.resblocks.23."  # last of SD 2.x's OpenCLIP; diffusers leaves it out
_TOKENIZER = "openai/clip-vit-large-patch14"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_HEAD = 64  # width of a head in CLIP, and in the UNets of SD 2.x and SDXL
_CHANNELS = 4  # channels of Stable Diffusion's latents
_VECTOR = 2816  # size of the vector of SDXL's base: pooled text and image sizes

Shapes = Mapping[str, tuple[int, ...]]


class Checkpoint:
    """A complete checkpoint and one part of it, such as `unet`.

    Attributes:
        path: file of the checkpoint.
        part: name of the part, which is its folder's name in a pipeline.
    """

    tokenizer_hint = (
        f"run `hf download {_TOKENIZER} tokenizer.json tokenizer_config.json "
        "special_tokens_map.json vocab.json merges.txt`, or name CLIP's tokenizer as "
        "`text: {tokenizer: FOLDER}`"
    )
    """Hint for a missing tokenizer: a checkpoint contains none."""

    def __init__(self, weights: Weights) -> None:
        self.path, self.part = Path(weights.path or ""), weights.subfolder or ""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name; raises ModelError."""
        if self.path.suffix != ".safetensors":
            hint = "convert it to safetensors, or name the folder of its pipeline"
            raise ModelError("is not a .safetensors file", where=self.path, hint=hint)
        try:
            return contents_of(self.path)[0]
        except ValueError as error:
            hint = "copy the checkpoint again"
            raise ModelError(str(error), where=self.path, hint=hint) from None

    @property
    def kind(self) -> str | None:
        """`sd1`, `sd2` or `sdxl`, by the text encoder in the file; None without a text encoder."""
        for kind, prefix in _RELEASES.items():
            if any(name.startswith(prefix) for name in self.tensors):
                return kind
        return None

    def own(self) -> tuple[str, dict[str, Tensor]]:
        """Return the prefix of the part's tensors, and these tensors by their names in the file.

        Raises:
            ModelError: the file does not contain the part.
        """
        if (prefix := prefix_of(self.part, self.tensors)) is None:
            what = f"holds no {self._word} in the names of a complete checkpoint"
            key = "text" if self.part.startswith("text") else self.part
            raise ModelError(what, where=self.path, hint=f"name it as `{key}` beside `checkpoint`")
        tensors = self.tensors.items()
        return prefix, {name: tensor for name, tensor in tensors if name.startswith(prefix)}

    def section(self) -> digest.Section:
        """Return the part for its digest: byte ranges, and further facts that the digest covers."""
        tensors = self.own()[1]
        start = self.path.stat().st_size - max(tensor.end for tensor in self.tensors.values())
        own = sorted(tensors.items())
        ranges = tuple((start + tensor.start, start + tensor.end) for _, tensor in own)
        shapes = [[name, tensor.dtype, [*tensor.shape]] for name, tensor in own]
        # Kind and shapes are included because `config` is derived from them.
        return digest.Section(self.path, self.part, [self.kind, shapes], ranges)

    def check(self, architecture: str | None, where: str) -> None:
        """Refuse a checkpoint of another architecture, or one that lacks the part."""
        kind = self.kind
        if kind not in (None, architecture) and (architecture or kind == "sdxl"):
            what = f"{self.path} is a checkpoint of {_TITLES[kind]}"
            raise ModelError(what, where=where, hint=f"set `architecture: {kind}`")
        try:
            self.config()
        except ModelError as error:
            raise ModelError(f"{error.where}: {error.what}", where=where, hint=error.hint) from None

    def config(self) -> dict[str, Any]:
        """Return the configuration of the part, in the form of a folder's config.json."""
        prefix, tensors = self.own()
        shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in tensors.items()}
        try:
            if self.part == "unet":
                return _unet_config(shapes, xl=self.kind == "sdxl")
            if self.part != "vae":
                return _text_config(shapes, self.part, prefix)
            config = vae_config(shapes)
            if config["latent_channels"] == _CHANNELS:  # a file that lacks one of these is damaged
                config |= {"use_quant_conv": True, "use_post_quant_conv": True}
            if self.kind == "sdxl":
                config |= {"scaling_factor": 0.13025, "force_upcast": True}
            return config
        except (LookupError, ValueError, TypeError):
            what = f"its {self._word} has shapes of no Stable Diffusion"
            raise ModelError(what, where=self.path, hint="name another checkpoint") from None

    @property
    def _word(self) -> str:
        return _PARTS.get(self.part, (self.part,))[0]

    def tokenizer(self) -> Path:
        """Return the folder of a tokenizer for a text encoder.

        This is `tokenizer` beside the file, as in the repositories of Stable Diffusion, or else
        CLIP's tokenizer in the local hub cache. All text encoders of Stable Diffusion share CLIP's
        vocabulary. If neither exists, return the path beside the file, for the error message.
        """
        beside = self.path.with_name("tokenizer")
        if beside.is_dir():
            return beside
        commit = known_commit(_TOKENIZER)
        folders = [place_of(_TOKENIZER, commit)] if commit else snapshots(_TOKENIZER)
        for folder in folders:
            if any((folder / name).is_file() for name in _TOKENIZER_FILES):
                return folder
        return beside


def prefix_of(part: str, names: Collection[str]) -> str | None:
    """Return the prefix of a part's tensors among names; None if they do not include the part."""
    _, prefixes = _PARTS.get(part, (part, ()))
    matching = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in names))
    return next(matching, None)


def vae_config(shapes: Shapes) -> dict[str, Any]:
    """Return the configuration of a VAE, from the shapes of its tensors.

    The tensors have LDM's or diffusers' names. Values that shapes do not determine keep diffusers'
    defaults, such as SD 1.x's scaling factor, 0.18215.

    Raises:
        LookupError: a tensor is missing.
        ValueError: the names are not those of an AutoencoderKL.
    """
    original = any(name.startswith("encoder.down.") for name in shapes)
    block = r"encoder\.down\.(\d+)\.block" if original else r"encoder\.down_blocks\.(\d+)\.resnets"
    channels, layers = dict[int, int](), 0
    for name, shape in shapes.items():
        if match := re.match(rf"{block}\.(\d+)\.conv[12]\.weight", name):
            channels[int(match[1])] = shape[0]
            layers = max(layers, int(match[2]) + 1)
    if not channels:
        raise ValueError("its keys are not those of an AutoencoderKL")
    colours, blocks = shapes["encoder.conv_in.weight"][1], len(channels)
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": colours,
        "out_channels": colours,
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "block_out_channels": [channels[index] for index in sorted(channels)],
        "layers_per_block": layers,
        "latent_channels": shapes["encoder.conv_out.weight"][0] // 2,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def _text_config(shapes: Shapes, part: str, prefix: str) -> dict[str, Any]:
    """Return the configuration of a CLIP or, if the prefix ends with `model.`, of an OpenCLIP."""
    open_clip, second = prefix.endswith("model."), part == "text_encoder_2"
    bare = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
    token, place = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"
    block, inner = "encoder.layers", "mlp.fc1"
    if open_clip:
        token, place = "token_embedding.weight", "positional_embedding"
        block, inner = "transformer.resblocks", "mlp.c_fc"
    unused = _UNUSED_BLOCK if prefix == _OPEN else " "
    names = (name for name in bare if unused not in name)
    words, width = bare[token]
    return {
        "architectures": ["CLIPTextModelWithProjection" if second else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": bare[f"{block}.0.{inner}.weight"][0],
        "num_hidden_layers": blocks_in(names, rf"{re.escape(block)}\.(\d+)\."),
        "num_attention_heads": max(width // _HEAD, 1),
        "max_position_embeddings": bare[place][0],
        "hidden_act": "gelu" if open_clip else "quick_gelu",
        "projection_dim": bare.get("text_projection", (width,))[0] if second else width,
        "bos_token_id": 0,
        # With 2, transformers takes the pooled vector at the highest id, CLIP's end of text.
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


def _unet_config(shapes: Shapes, *, xl: bool) -> dict[str, Any]:
    """Return the configuration of a UNet whose tensors have the names of LDM.

    Few tensors decide, so a file that lacks any other one does not have those of its configuration.
    """
    blocks = {int(name.split(".")[1]) for name in shapes if name.startswith("input_blocks.")}
    halving = sorted(block for block in blocks if f"input_blocks.{block}.0.op.weight" in shapes)
    step = halving[0] if halving else len(blocks)  # blocks of a level: its layers, its downsampler
    firsts = [1, *(block + 1 for block in halving)]
    channels = [shapes[f"input_blocks.{block}.0.out_layers.3.weight"][0] for block in firsts]
    places = [f"input_blocks.{block}.1.transformer_blocks." for block in firsts]
    depths = [
        len({name.split(".")[4] for name in shapes if name.startswith(place)}) for place in places
    ]
    width = shapes["middle_block.1.transformer_blocks.0.attn2.to_k.weight"][1]
    heads = [max(count // _HEAD, 1) for count in channels]
    types = ["CrossAttn" if depth else "" for depth in depths]
    config: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel",
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": step - 1,
        "down_block_types": [f"{attention}DownBlock2D" for attention in types],
        "up_block_types": [f"{attention}UpBlock2D" for attention in types[::-1]],
        "cross_attention_dim": width,
        "attention_head_dim": 8 if width == 768 else heads,  # SD 1.x has 8 heads in each block
        "use_linear_projection": len(shapes["middle_block.1.proj_in.weight"]) == 2,
    }
    if max(depths) > 1:
        config["transformer_layers_per_block"] = [max(depth, 1) for depth in depths]
    if xl or any(name.startswith("label_emb.") for name in shapes):
        config["addition_embed_type"] = "text_time"
        config["addition_time_embed_dim"] = 256
        vector = shapes.get("label_emb.0.0.weight", (0, _VECTOR))[1]
        config["projection_class_embeddings_input_dim"] = vector
    return config
