"""Kind of network that a file of weights holds, from the names of its tensors.

A wrong path in the configuration is found in milliseconds, not after minutes of loading. A
safetensors file has the names in its header; a torch file has them as strings in its pickle, which
is read opcode by opcode and never executed.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import IO, Literal, NamedTuple

from latentmake.config import hub
from latentmake.files.safetensors import Tensor, read_head

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
"""Suffixes of torch files."""

Kind = Literal[
    "LoRA",
    "Wan DiT",
    "transformer of another model",
    "CLIP image encoder",
    "umT5 text encoder",
    "text encoder of another model",
    "VAE of Wan 2.2's 5B model",
    "VAE of another model",
    "Wan VAE",
    "UNet",
]
Role = Literal["vae", "unet", "text", ""]
"""Key of a model that takes such a network, if any but Wan's own; `unet` takes SD 3 too."""

# In this order: an image-to-video DiT has more than one mark, a LoRA contains its network's names.
_KINDS: tuple[tuple[Kind, Role, str], ...] = (
    ("LoRA", "", r"lora_(down|up)|lora_[AB]\.|\.lora_"),
    ("Wan DiT", "", r"\.(self_attn\.q|cross_attn\.k)\.|^patch_embedding\.|^blocks\.0\.attn1\."),
    (
        "transformer of another model",
        "unet",
        r"^(double_blocks|single_blocks|transformer_blocks|joint_blocks)\.",
    ),
    ("UNet", "unet", r"^(down_blocks|input_blocks|up_blocks)\."),
    (
        "CLIP image encoder",
        "",
        r"^(visual|vision_model|embeddings\.(class|patch)_embedding)\b|\bvisual\.transformer\.",
    ),
    (
        "umT5 text encoder",
        "text",
        r"^(token_embedding|shared|encoder\.(block|embed_tokens))\.|\.SelfAttention\.|"
        r"\bblocks\.0\.ffn\.gate\.",
    ),
    (
        "text encoder of another model",
        "text",
        r"^((transformer\.)?text_model|cond_stage_model|conditioner|embeddings|encoder\.layers)\.",
    ),
    ("VAE of Wan 2.2's 5B model", "vae", r"^encoder\.downsamples\.0\.downsamples\."),
    (
        "VAE of another model",
        "vae",
        r"^(encoder|decoder)\.(conv_norm_out|norm_out)\.weight$|^first_stage_model\.|"
        r"^encoder\.(down\.0\.block|down_blocks\.0\.resnets)\.",
    ),
    ("Wan VAE", "vae", r"^(encoder|decoder)\.(downsamples|upsamples|conv1|conv_in)\."),
    ("VAE of another model", "vae", r"^(encoder\.down|decoder\.)"),
)
# Parts of names that only converted weights of a kind have, and the library with such names.
_CONVERTED: dict[Kind, tuple[str, str]] = {
    "Wan DiT": (r"\.attn1\.to_|condition_embedder\.", "diffusers"),
    "Wan VAE": (r"(encoder|decoder)\.conv_in\.|encoder\.down_blocks\.", "diffusers"),
    "umT5 text encoder": (r"encoder\.block\.0\.|\.SelfAttention\.", "transformers"),
    "CLIP image encoder": (r"vision_model\.|embeddings\.class_embedding", "transformers"),
}
# Prefixes in the files of ComfyUI, and of trainers that wrap the network.
_WRAPPED = re.compile(r"^(model\.diffusion_model\.)?(diffusion_model\.)?(module\.)?", re.MULTILINE)


class Content(NamedTuple):
    """Content of a file of weights.

    Attributes:
        kind: of network; None where the names are unknown.
        tensors: name -> tensor; without dtype and shape for a torch file.
    """

    kind: Kind | None
    tensors: Mapping[str, Tensor]

    @property
    def converted(self) -> str | None:
        """The library that the tensors are named for; None for Wan's original names.

        musubi-tuner knows the original names alone.
        """
        marks, library = _CONVERTED.get(self.kind or "LoRA", ("$^", None))
        return library if re.search(marks, "\n".join(self.tensors)) else None


def kinds_of(names: Iterable[str]) -> list[tuple[Kind, Role]]:
    """Return the kinds of network that tensors of these names may belong to, the likeliest first.

    A complete checkpoint has several.
    """
    bare = _WRAPPED.sub("", "\n".join(names))
    return [(kind, role) for kind, role, marks in _KINDS if re.search(marks, bare, re.MULTILINE)]


def weight_file(path: Path) -> Path:
    """Return the file that stands for some weights: the path itself, or a folder's first file.

    Raises:
        ValueError: nothing is there, or the folder has no file of weights.
    """
    if not path.exists():
        raise ValueError(hub.absence(path))
    if not path.is_dir():
        return path
    for suffix in (".safetensors", *PICKLES):
        if found := sorted(path.glob(f"*{suffix}")):
            return found[0]
    raise ValueError("is a folder without a file of weights")


def content_of(path: Path) -> Content:
    """Return the content of a file of weights.

    Raises:
        ValueError: it is neither a safetensors nor a torch file, or cut short; says which.
        OSError: it cannot be read.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise ValueError("is no regular file")
    if stat.st_size == 0:
        raise ValueError("is an empty file")
    if path.suffix == ".safetensors":
        tensors = read_head(path).tensors
    elif path.suffix in PICKLES:
        tensors = dict.fromkeys(_torch_names(path), Tensor("", (), 0, 0))
    else:
        raise ValueError("is neither a .safetensors nor a .pth file")
    kinds = kinds_of(tensors)
    return Content(kinds[0][0] if kinds else None, tensors)


def _torch_names(path: Path) -> list[str]:
    """Return all strings of a torch file's pickle, of which its tensors' names are some."""
    try:
        with path.open("rb") as file:
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
    for code, argument, _ in pickletools.genops(file):
        if "UNICODE" in code.name and isinstance(argument, str):
            yield argument
