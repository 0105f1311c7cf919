"""Networks in files of weights, told by the names and shapes of their tensors.

A wrong path in the configuration is found in milliseconds, not after minutes of loading. A
safetensors file has the names in its header; a torch file has them as strings in its pickle, which
is read opcode by opcode and never executed.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from latentmake.config.weights import Weights, absence
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


def part_of(weights: Weights) -> str | None:
    """Return the part of a complete checkpoint that weights name, such as `unet`; else None."""
    single = weights.path is not None and weights.subfolder and Path(weights.path).is_file()
    return weights.subfolder if single else None


def contents_of(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return tensors and metadata of a file of weights, whose header is read once; ValueError."""
    try:
        stat = path.stat()
        return _contents_then(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


@lru_cache(8)
def _contents_then(
    path: Path, _size: int, _time: int
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    if path.suffix != ".safetensors":
        return tensors_of(path), {}
    head = read_head(path)
    return head.tensors, head.metadata
