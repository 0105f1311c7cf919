"""What a file of weights holds, told from the names of its tensors: nothing is loaded or unpickled.

A wrong path in the configuration is found in milliseconds, not after minutes of loading. A
safetensors file has the names in its header; a torch file has them as strings in its pickle, which
is read opcode by opcode and never carried out.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple

from latentmake.files.safetensors import Tensor, read_head

__all__ = ["Content", "Kind", "content_of", "weight_file"]

Kind = Literal[
    "Wan DiT",
    "Wan VAE",
    "umT5 text encoder",
    "CLIP image encoder",
    "LoRA",
    "VAE of another model",
    "transformer of another model",
    "UNet",
]
# Parts of names that only the converted weights of a kind have.
_CONVERTED: dict[Kind, tuple[str, ...]] = {
    "Wan DiT": (".attn1.to_", "condition_embedder."),
    "Wan VAE": ("encoder.conv_in.", "decoder.conv_in.", "encoder.down_blocks."),
    "umT5 text encoder": ("encoder.block.0.", ".SelfAttention."),
    "CLIP image encoder": ("vision_model.", "embeddings.class_embedding"),
}
_SAFETENSORS = ".safetensors"
_TORCH = (".pth", ".pt", ".bin", ".ckpt")


class Content(NamedTuple):
    """What a file of weights holds.

    Attributes:
        kind: whose weights they are; None where the names say nothing.
        tensors: name -> tensor; without dtype and shape for a torch file.
    """

    kind: Kind | None
    tensors: Mapping[str, Tensor]

    @property
    def converted(self) -> str | None:
        """The library that the tensors are named for; None for Wan's original names.

        musubi-tuner knows the original names alone.
        """
        marks = _CONVERTED.get(self.kind or "LoRA", ())
        if not any(mark in name for mark in marks for name in map(_bare, self.tensors)):
            return None
        return "diffusers" if self.kind in ("Wan DiT", "Wan VAE") else "transformers"


def weight_file(path: Path) -> Path:
    """Return the file that stands for some weights: the path itself, or a folder's first file.

    Raises:
        ValueError: nothing is there, or the folder has no file of weights.
    """
    if not path.exists():
        raise ValueError("does not exist")
    if not path.is_dir():
        return path
    for ending in (_SAFETENSORS, *_TORCH):
        if found := sorted(path.glob(f"*{ending}")):
            return found[0]
    raise ValueError("is a folder without a file of weights")


def content_of(path: Path) -> Content:
    """Return what a file of weights holds.

    Raises:
        ValueError: it is neither a safetensors nor a torch file, or cut short; says which.
        OSError: it cannot be read.
    """
    if path.stat().st_size == 0:
        raise ValueError("is an empty file")
    if path.suffix == _SAFETENSORS:
        tensors = read_head(path).tensors
    elif path.suffix in _TORCH:
        tensors = dict.fromkeys(_torch_names(path), Tensor("", (), 0, 0))
    else:
        raise ValueError("is neither a .safetensors nor a .pth file")
    return Content(_kind({_bare(name): tensor for name, tensor in tensors.items()}), tensors)


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


def _bare(name: str) -> str:
    # ComfyUI's files, and those of trainers that wrap the network.
    for prefix in ("model.diffusion_model.", "diffusion_model.", "module."):
        name = name.removeprefix(prefix)
    return name


def _kind(tensors: Mapping[str, Tensor]) -> Kind | None:
    names = set(tensors)

    def has(*beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in names)

    def contains(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    # In this order: an image-to-video DiT has more than one mark, a LoRA bears its network's names.
    rules: list[tuple[Kind, Callable[[], bool]]] = [
        ("LoRA", lambda: contains("lora_down", "lora_up", "lora_A.", "lora_B.")),
        (
            "Wan DiT",
            lambda: (
                contains(".self_attn.q.", ".cross_attn.k.")
                or (has("patch_embedding.") and has("blocks.0.", "head.", "condition_embedder."))
            ),
        ),
        (
            "transformer of another model",
            lambda: has("double_blocks.", "single_blocks.", "transformer_blocks.", "joint_blocks."),
        ),
        (
            "CLIP image encoder",
            lambda: has("visual.", "vision_model.", "embeddings.class_embedding"),
        ),
        (
            "umT5 text encoder",
            lambda: (
                has("token_embedding.", "shared.", "encoder.block.0.", "encoder.embed_tokens.")
                or contains(".SelfAttention.q.")
            ),
        ),
        (
            "VAE of another model",
            lambda: bool(
                names
                & {
                    "encoder.conv_norm_out.weight",
                    "decoder.conv_norm_out.weight",
                    "encoder.norm_out.weight",
                    "decoder.norm_out.weight",
                }
            ),
        ),
        (
            "Wan VAE",
            lambda: has(
                *("encoder.downsamples.", "decoder.upsamples.", "encoder.conv1."),
                *("decoder.conv1.", "encoder.conv_in.", "decoder.conv_in."),
            ),
        ),
        ("UNet", lambda: has("down_blocks.", "input_blocks.", "up_blocks.")),
    ]
    return next((kind for kind, fits in rules if fits()), None)
