"""Networks in files of weights, told by the names and shapes of their tensors.

A wrong path in the configuration is found in milliseconds, not after minutes of loading. A
safetensors file has the names in its header; a torch file has them as strings in its pickle, which
is read opcode by opcode and never executed.

A complete checkpoint of Stable Diffusion is one file with VAE, text encoders and UNet in the names
of the original releases (LDM), as Civitai's files are. The configuration of each part is read off
the shapes; what no shape says is that of the published models of Stable Diffusion 1.x, 2.x and XL.
A checkpoint that is damaged, lacks a part or has other shapes is a ModelError.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from latentmake import digest
from latentmake.config.weights import Weights, absence, known_commit, place_of, snapshots
from latentmake.errors import ModelError
from latentmake.files.safetensors import Tensor, read_head
from latentmake.regular import open_regular

if TYPE_CHECKING:
    from latentmake.config.architectures import Vae

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
"""Suffixes of torch files."""
SUFFIXES = (".safetensors", *PICKLES)
"""Suffixes of files whose tensors are known."""
LORA = "LoRA"
"""Kind of a LoRA's file: it has no other, since it contains the names of its network."""
_LORA = r"lora_(down|up)|lora_[AB]\.|\.lora_"
# Kind, and pattern of names of its tensors: those of original releases, of diffusers and of
# transformers. The first kind of a family counts.
_KINDS = (
    ("Wan DiT", r"\.(self_attn\.q|cross_attn\.k)\.|^patch_embedding\.|^blocks\.0\.attn1\."),
    ("UNet", r"^(down_blocks|input_blocks|up_blocks)\."),
    (
        "image encoder",
        r"(^|\.)vision_model\.|^visual\.(transformer|patch_embedding|cls_embedding)\b|"
        r"^embeddings\.(class|patch)_embedding\b",
    ),
    (
        "T5",
        r"(^|\.)encoder\.(block|embed_tokens)\.|\.SelfAttention\.|^(token_embedding|shared)\.|"
        r"\.ffn\.gate\.",
    ),
    (
        "CLIP text encoder",
        r"(^|\.)text_model\.|^(embeddings\.(token|word)_embeddings?|text_projection)\b|"
        r"^(cond_stage_model|conditioner)\.",
    ),
    (
        "language model",
        r"(^|\.)(model|language_model)\.layers\.|^layers\.\d+\.(self_attn\.q_proj|mlp\.gate_proj)|"
        r"(^|\.)embed_tokens\.weight$",
    ),
    ("VAE of Wan 2.2's 5B model", r"^encoder\.downsamples\.0\.downsamples\."),
    (
        "VAE",
        r"^(encoder|decoder)\.(conv_norm_out|norm_out)\.weight$|^first_stage_model\.|"
        r"^encoder\.(down\.0\.block|down_blocks\.0\.resnets)\.",
    ),
    ("Wan VAE", r"^(encoder|decoder)\.(downsamples|upsamples|conv1|conv_in)\."),
    ("VAE", r"^(vae\.)?(encoder|decoder)\.(conv_in|conv1|down|up|mid)|^decoder\.layers\."),
    (
        "DiT",
        r"(^|\.)((double|single|transformer|single_transformer|joint)_blocks|noise_refiner)\.|"
        r"^(model\.)?diffusion_model\.|^blocks\.\d+\.(cross_attn|attn\d|attn\.(?![qkvo]\.))",
    ),
)
# Kind -> the family of networks that a key of a model asks for, where it is another.
_FAMILIES = {"Wan DiT": "DiT", "Wan VAE": "VAE", "VAE of Wan 2.2's 5B model": "VAE"}
# Prefixes in the files of ComfyUI, and of trainers that wrap the network.
_WRAPPED = re.compile(r"^(model\.diffusion_model\.)?(diffusion_model\.)?(module\.)?", re.MULTILINE)
# First layers of a VAE's halves, whose shapes tell one from another.
_ENTRY = r"(^|\.){}\.(conv_in|conv1)(\.conv)?\.weight$"


def kinds_of(names: Iterable[str]) -> dict[str, str]:
    """Return family -> kind of the networks that tensors of these names belong to.

    The likeliest comes first. A complete checkpoint has several; unknown names have none.
    """
    own = "\n".join(names)
    if re.search(_LORA, own):
        return {LORA: LORA}
    text = f"{own}\n{_WRAPPED.sub('', own)}"
    found: dict[str, str] = {}
    for kind, pattern in _KINDS:
        family = _FAMILIES.get(kind, kind)
        if family not in found and re.search(pattern, text, re.MULTILINE):
            found[family] = kind
    return found


def one(kind: str) -> str:
    """Return a kind with its article: `a VAE`, `an image encoder`."""
    return f"{'an' if kind[:1] == 'i' else 'a'} {kind or 'network'}"


def vae_of(tensors: Mapping[str, Tensor]) -> Vae | None:
    """Return the sizes of a VAE; None where its names or shapes are not known."""
    from latentmake.config.architectures import Vae

    first, last = (
        next((x.shape for name, x in tensors.items() if re.search(_ENTRY.format(half), name)), ())
        for half in ("encoder", "decoder")
    )
    return Vae(len(last) - 2, last[1], first[1]) if len(first) == len(last) > 3 else None


def lack(path: Path, marks: Collection[str], what: str) -> str:
    """Return why no tensor of a file has one of the marks of a network; "" where one has."""
    try:
        names = tensors_of(path)
    except ValueError as error:
        return str(error)
    if any(mark in name for mark in marks for name in names):
        return ""
    kind = next(iter(kinds_of(names).values()), "")
    return f"holds no {what}{f', but {one(kind)}' if kind else ''}"


# -- files ----------------------------------------------------------------------------------------


def weight_file(path: Path) -> Path:
    """Return the file that stands for weights: itself, or a folder's first; raises ValueError."""
    if not path.exists():
        raise ValueError(absence(path))
    if not path.is_dir():
        return path
    for suffix in SUFFIXES:
        if found := sorted(path.glob(f"*{suffix}")):
            return found[0]
    raise ValueError("is a folder without a file of weights")


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file of weights by name; of a torch file without dtype and shape.

    Raises:
        ValueError: it cannot be read, is cut short, or no safetensors or torch file; says which.
    """
    try:
        if path.suffix == ".safetensors":
            return read_head(path).tensors
        if path.suffix in PICKLES:
            return dict.fromkeys(_torch_names(path), Tensor("", (), 0, 0))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    raise ValueError("is neither a .safetensors nor a .pth file")


def _torch_names(path: Path) -> list[str]:
    """Return all strings of a torch file's pickle, of which its tensors' names are some."""
    try:
        with open_regular(path)[0] as file:
            if not zipfile.is_zipfile(file):
                # The old format: a magic number, a version, facts of the system, then the weights.
                file.seek(0)
                return [name for _ in range(4) for name in _strings(file)]
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    if member.endswith("data.pkl"):
                        with archive.open(member) as pickled:
                            return list(_strings(pickled))
    except (ValueError, EOFError, IndexError, struct.error, zipfile.BadZipFile, RuntimeError):
        pass  # RuntimeError: encrypted, or packed in a way that zipfile does not know
    raise ValueError("is cut short or no torch file")


def _strings(file: IO[bytes]) -> Iterator[str]:
    import pickletools

    for code, argument, _ in pickletools.genops(file):
        if "UNICODE" in code.name and isinstance(argument, str):
            yield argument


# -- complete checkpoints -------------------------------------------------------------------------

SCHEDULE = Path(__file__).with_name("stable_diffusion")
"""Folder of Stable Diffusion's noise schedule, which no checkpoint holds."""

_FIRST, _OPEN, _XL = "cond_stage_model.transformer.", "cond_stage_model.model.", "conditioner."
# Folder of a part in a pipeline -> prefixes of its tensors; a file has one of them.
_PREFIXES = {
    "vae": ("first_stage_model.",),
    "unet": ("model.diffusion_model.",),
    "text_encoder": (_FIRST, _OPEN, f"{_XL}embedders.0.transformer."),
    "text_encoder_2": (f"{_XL}embedders.1.model.",),
}
_WORDS = {
    "vae": "VAE",
    "unet": "UNet",
    "text_encoder": "text encoder",
    "text_encoder_2": "second text encoder",
}
_RELEASES = {"sd1": _FIRST, "sd2": _OPEN, "sdxl": _XL}
_TITLES = {"sd1": "Stable Diffusion 1.x", "sd2": "Stable Diffusion 2.x", "sdxl": "SDXL"}
_UNUSED_BLOCK = "transformer.resblocks.23."  # of SD 2.x's OpenCLIP, as diffusers leaves it out
_TOKENIZER = "openai/clip-vit-large-patch14"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
TOKENIZER_HINT = (
    f"run `hf download {_TOKENIZER} tokenizer.json tokenizer_config.json special_tokens_map.json "
    "vocab.json merges.txt`, or name CLIP's tokenizer as `text: {tokenizer: FOLDER}`"
)
"""How a checkpoint's text encoders get the tokenizer that they lack."""
_HEAD = 64  # width of a head in CLIP, and in the UNets of SD 2.x and SDXL
Shapes = Mapping[str, tuple[int, ...]]


def part_of(weights: Weights) -> str | None:
    """Return the part of a complete checkpoint that weights name, such as `unet`; else None."""
    single = weights.path is not None and weights.subfolder and Path(weights.path).is_file()
    return weights.subfolder if single else None


def tensors_in(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    if path.suffix != ".safetensors":
        hint = "convert it to safetensors, or name the folder of its pipeline"
        raise ModelError("is not a .safetensors file", where=path, hint=hint)
    try:
        return contents_of(path)[0]
    except ValueError as error:
        raise ModelError(str(error), where=path, hint="copy the checkpoint again") from None


def contents_of(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return tensors and metadata of a file of weights, whose header is read once; ValueError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    return _contents_then(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(8)
def _contents_then(
    path: Path, _size: int, _time: int
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    if path.suffix != ".safetensors":
        return tensors_of(path), {}
    try:
        head = read_head(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    return head.tensors, head.metadata


def _own(weights: Weights) -> tuple[str | None, str, dict[str, Tensor]]:
    """Return the kind of a checkpoint, and prefix and tensors of a part; raises ModelError."""
    path, part = Path(weights.path or ""), weights.subfolder or ""
    tensors = tensors_in(path)
    if (prefix := prefix_of(part, tensors)) is None:
        what = f"holds no {_WORDS.get(part, part)} in the names of a complete checkpoint"
        hint = f"name it as `{'text' if part.startswith('text') else part}` beside `checkpoint`"
        raise ModelError(what, where=path, hint=hint)
    own = {name: each for name, each in tensors.items() if name.startswith(prefix)}
    return kind_of(tensors), prefix, own


def section_of(weights: Weights) -> digest.Section | None:
    """Return a part of a complete checkpoint, for its digest; None for any other weights."""
    if (part := part_of(weights)) is None:
        return None
    path, (kind, _, tensors) = Path(weights.path or ""), _own(weights)
    start = path.stat().st_size - max(each.end for each in tensors_in(path).values())
    own = sorted(tensors.items())
    ranges = tuple((start + each.start, start + each.end) for _, each in own)
    shapes = [[name, each.dtype, [*each.shape]] for name, each in own]
    return digest.Section(path, part, [kind, shapes], ranges)  # the kind counts in `config_of`


def kind_of(names: Collection[str]) -> str | None:
    """Return `sd1`, `sd2` or `sdxl`, by the text encoder in a checkpoint; None: there is none."""
    found = (kind for kind, own in _RELEASES.items() if any(x.startswith(own) for x in names))
    return next(found, None)


def prefix_of(part: str, names: Collection[str]) -> str | None:
    """Return the prefix of a part's tensors in a checkpoint; None where it holds no such part."""
    prefixes = _PREFIXES.get(part, ())
    return next((each for each in prefixes if any(x.startswith(each) for x in names)), None)


def check_checkpoint(weights: Weights, architecture: str | None, where: str) -> None:
    """Refuse a checkpoint of another architecture, or without the part that weights name."""
    kind = kind_of(tensors_in(Path(weights.path or "")))
    if kind not in (None, architecture) and (architecture or kind == "sdxl"):
        what = f"{weights.path} is a checkpoint of {_TITLES[kind]}"
        raise ModelError(what, where=where, hint=f"set `architecture: {kind}`")
    try:
        config_of(weights)
    except ModelError as error:
        raise ModelError(f"{error.where}: {error.what}", where=where, hint=error.hint) from None


def config_of(weights: Weights) -> dict[str, Any]:
    """Return the configuration of a part of a checkpoint, as a folder's config.json has it."""
    kind, prefix, tensors = _own(weights)
    own = {name.removeprefix(prefix): each.shape for name, each in tensors.items()}
    part = weights.subfolder or ""
    try:
        if part == "vae":
            known = {"scaling_factor": 0.13025, "force_upcast": True} if kind == "sdxl" else {}
            return vae_config(own) | known
        return _unet_config(own) if part == "unet" else _text_config(own, part, prefix)
    except (LookupError, ValueError, TypeError):
        what = f"its {_WORDS.get(part, part)} has shapes of no Stable Diffusion"
        hint = "name another checkpoint"
        raise ModelError(what, where=weights.path or "", hint=hint) from None


def vae_config(shapes: Shapes) -> dict[str, Any]:
    """Return the configuration of a VAE in the names of LDM or of diffusers.

    What shapes do not say is left to diffusers' defaults, such as SD 1.x's scaling factor, 0.18215.

    Raises:
        ValueError: it is no AutoencoderKL.
    """
    original = any(name.startswith("encoder.down.") for name in shapes)
    block = r"encoder\.down\.(\d+)\.block" if original else r"encoder\.down_blocks\.(\d+)\.resnets"
    channels: dict[int, int] = {}
    layers = 0
    for name, shape in shapes.items():
        if match := re.match(rf"{block}\.(\d+)\.conv2\.weight", name):
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
    """Return the configuration of a CLIP in transformers' names, or of an OpenCLIP in its own."""
    open_clip, second = prefix.endswith("model."), part == "text_encoder_2"
    bare = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
    token, place, block, inner = (
        ("token_embedding.weight", "positional_embedding", "transformer.resblocks", "mlp.c_fc")
        if open_clip
        else (
            "embeddings.token_embedding.weight",
            "embeddings.position_embedding.weight",
            "encoder.layers",
            "mlp.fc1",
        )
    )
    unused = _UNUSED_BLOCK if prefix == _OPEN else " "
    numbers = [re.match(rf"{re.escape(block)}\.(\d+)\.", x) for x in bare if unused not in x]
    words, width = bare[token]
    return {
        "architectures": ["CLIPTextModelWithProjection" if second else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": bare[f"{block}.0.{inner}.weight"][0],
        "num_hidden_layers": 1 + max(int(match[1]) for match in numbers if match),
        "num_attention_heads": max(width // _HEAD, 1),
        "max_position_embeddings": bare[place][0],
        "hidden_act": "gelu" if open_clip else "quick_gelu",
        "projection_dim": bare.get("text_projection", (width,))[0] if second else width,
        "bos_token_id": 0,
        "eos_token_id": 2,  # the pooled vector is that of the highest id, CLIP's end of text
        "pad_token_id": 1,
    }


def _unet_config(shapes: Shapes) -> dict[str, Any]:
    """Return the configuration of a UNet in the names of LDM."""
    inputs = {int(x.split(".")[1]) for x in shapes if x.startswith("input_blocks.")}
    halves = sorted(x for x in inputs if f"input_blocks.{x}.0.op.weight" in shapes)
    step = halves[0] if halves else len(inputs)  # blocks of a level: its layers, and what halves
    firsts = [1, *(each + 1 for each in halves)]
    channels = [shapes[f"input_blocks.{x}.0.out_layers.3.weight"][0] for x in firsts]
    attends = [f"input_blocks.{x}.1.proj_in.weight" in shapes for x in firsts]
    depths = [
        len({n.split(".")[4] for n in shapes if n.startswith(f"input_blocks.{x}.1.transformer_")})
        for x in firsts
    ]
    middle = "middle_block.1."
    width = shapes[f"{middle}transformer_blocks.0.attn2.to_k.weight"][1]
    linear = len(shapes[f"{middle}proj_in.weight"]) == 2
    fixed_heads = width == 768  # SD 1.x has 8 heads in each block
    found: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel",
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": step - 1,
        "down_block_types": ["CrossAttnDownBlock2D" if x else "DownBlock2D" for x in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if x else "UpBlock2D" for x in attends[::-1]],
        "cross_attention_dim": width,
        "attention_head_dim": 8 if fixed_heads else [max(x // _HEAD, 1) for x in channels],
        "use_linear_projection": linear,
    }
    if max(depths) > 1:
        found["transformer_layers_per_block"] = [max(each, 1) for each in depths]
    if "label_emb.0.0.weight" in shapes:
        found["addition_embed_type"] = "text_time"
        found["addition_time_embed_dim"] = 256
        found["projection_class_embeddings_input_dim"] = shapes["label_emb.0.0.weight"][1]
    return found


# -- the tokenizer --------------------------------------------------------------------------------


def tokenizer_of(weights: Weights) -> Path:
    """Return the folder of a tokenizer for a checkpoint's text encoder.

    It is `tokenizer` beside the file, as in the repositories of Stable Diffusion, else CLIP's in
    the local hub cache. All of Stable Diffusion's text encoders share CLIP's vocabulary.
    """
    beside = Path(weights.path or "").with_name("tokenizer")
    if beside.is_dir():
        return beside
    known = known_commit(_TOKENIZER)
    folders = [place_of(_TOKENIZER, known)] if known else snapshots(_TOKENIZER)
    fit = (x for x in folders if any((x / name).is_file() for name in _TOKENIZER_FILES))
    return next(fit, beside)


START_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"
"""CLIP's tokens around a caption; the second pads it unless a tokenizer says otherwise."""


def pads_with_zero(weights: Weights) -> bool:
    """Whether captions are padded by the token 0, as OpenCLIP's are, not by the end of text."""
    return part_of(weights) is not None and _own(weights)[1].endswith(".model.")
