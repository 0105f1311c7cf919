"""Identify the networks in files of weights by the names and shapes of their tensors.

This detects a wrong path in the configuration within milliseconds, not after minutes of loading. A
safetensors file contains the names in its header. A torch file contains them as strings in its
pickle, which is read opcode by opcode and never executed.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO

from latentmake.base.regular import open_regular
from latentmake.config.makers import Vae
from latentmake.config.weights import absence
from latentmake.formats.safetensors import Tensor, read_head

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
"""Suffixes of torch files."""
SUFFIXES = (".safetensors", *PICKLES)
"""Suffixes of files whose tensors can be listed."""
LORA = "LoRA"
"""Kind of a LoRA's file, and its only kind, although the file names the layers of its network."""
_LORA = r"lora_(down|up)|lora_[AB]\.|\.lora_"
# Kind, and pattern of its tensors' names in original releases, diffusers and transformers. The
# order matters: `kinds_of` takes the first kind of a family that matches.
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
# Kind -> family of networks that a key of a model accepts, if the kind is not its own family.
_FAMILIES = {"Wan DiT": "DiT", "Wan VAE": "VAE", "VAE of Wan 2.2's 5B model": "VAE"}
# Prefixes in files of ComfyUI and of trainers that wrap the network.
_WRAPPED = re.compile(r"^(model\.diffusion_model\.)?(diffusion_model\.)?(module\.)?", re.MULTILINE)
# Token embeddings of a text encoder: [vocabulary, width].
_TABLE = re.compile(r"(^|\.)(token_embedding|embed_tokens|shared|word_embeddings)\.weight$")
# First layer of a VAE's encoder or decoder; the shapes of both identify the VAE.
_ENTRY = r"(^|\.){}\.(conv_in|conv1)(\.conv)?\.weight$"


def kinds_of(names: Iterable[str]) -> dict[str, str]:
    """Return family -> kind of the networks to which tensors with these names belong.

    The most likely network comes first. A complete checkpoint has several; unknown names have none.
    """
    joined = "\n".join(names)
    if re.search(_LORA, joined):
        return {LORA: LORA}
    text = f"{joined}\n{_WRAPPED.sub('', joined)}"
    kinds: dict[str, str] = {}
    for kind, pattern in _KINDS:
        family = _FAMILIES.get(kind, kind)
        if family not in kinds and re.search(pattern, text, re.MULTILINE):
            kinds[family] = kind
    return kinds


def one(kind: str) -> str:
    """Return a kind with its article: `a VAE`, `an image encoder`."""
    return f"{'an' if kind[:1] == 'i' else 'a'} {kind or 'network'}"


def vae_of(tensors: Mapping[str, Tensor]) -> Vae | None:
    """Return the sizes of a VAE; None if its names or shapes are not known."""
    first, last = (
        next((tensors[name].shape for name in tensors if re.search(entry, name)), ())
        for entry in (_ENTRY.format("encoder"), _ENTRY.format("decoder"))
    )
    return Vae(len(last) - 2, last[1], first[1]) if len(first) == len(last) > 3 else None


def embedding_width(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the width of a text encoder, from its token embeddings; None without known ones."""
    tables = (tensor.shape for name, tensor in tensors.items() if _TABLE.search(name))
    return next((shape[1] for shape in tables if len(shape) == 2), None)


def lack(path: Path, marks: Collection[str], what: str) -> str:
    """Return the reason why a file does not contain a network; "" if it contains the network.

    Args:
        path: file of weights.
        marks: parts of tensor names that occur only in the network.
        what: name of the network, for the reason.
    """
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
    """Return a file of weights itself, or the first file of weights in a folder.

    Raises:
        ValueError: the path does not exist, or the folder contains no file of weights.
    """
    if not path.exists():
        raise ValueError(absence(path))
    if not path.is_dir():
        return path
    for suffix in SUFFIXES:
        if files := sorted(path.glob(f"*{suffix}")):
            return files[0]
    raise ValueError("is a folder without a file of weights")


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file of weights by name; for a torch file, without dtype and shape.

    Raises:
        ValueError: the file cannot be read, is cut short, or is no safetensors or torch file.
    """
    return contents_of(path)[0]


def _torch_names(path: Path) -> list[str]:
    """Return all strings in a torch file's pickle, among them the names of its tensors."""
    try:
        with open_regular(path)[0] as file:
            if not zipfile.is_zipfile(file):
                # The old format is four pickles: magic number, version, system, weights.
                file.seek(0)
                return [name for _ in range(4) for name in _strings(file)]
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    if member.endswith("data.pkl"):
                        with archive.open(member) as pickled:
                            return list(_strings(pickled))
    except (ValueError, EOFError, IndexError, struct.error, zipfile.BadZipFile, RuntimeError):
        pass  # zipfile raises a RuntimeError for encryption and unknown compression
    raise ValueError("is cut short or no torch file")


def _strings(file: IO[bytes]) -> Iterator[str]:
    import pickletools

    for code, argument, _ in pickletools.genops(file):
        if "UNICODE" in code.name and isinstance(argument, str):
            yield argument


def contents_of(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return the tensors and the metadata of a file of weights, cached; see `tensors_of`."""
    try:
        stat = path.stat()
        return _contents_then(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


# The stat is part of the cache's key, so that a changed file is read again.
@lru_cache(8)
def _contents_then(
    path: Path, _size: int, _time: int, _inode: int
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    if path.suffix == ".safetensors":
        head = read_head(path)
        return head.tensors, head.metadata
    if path.suffix in PICKLES:
        return dict.fromkeys(_torch_names(path), Tensor("", (), 0, 0)), {}
    raise ValueError("is neither a .safetensors nor a .pth file")
