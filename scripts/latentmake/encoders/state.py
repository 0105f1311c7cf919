"""Weights as one table of tensors, from a folder or a single file, checked before they are used.

Loaders that make up what a file lacks, or fail in words about meta tensors, help nobody: here a
network is filled with exactly what its weights hold, or refused in one line.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.config import Weights
from latentmake.errors import ModelError, first_line
from latentmake.weights import config_file, weights_files

__all__ = [
    "LOAD_FAULTS",
    "State",
    "build",
    "fill",
    "is_config_of",
    "kind_of",
    "local_config",
    "local_state",
    "refusal",
]

State = dict[str, torch.Tensor]

LOAD_FAULTS = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    TypeError,
    AttributeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""What loading weights that are damaged, incomplete or of another kind ends in."""

_COPY = "copy it again"
_CODE = "holds more than tensors, and loading that could run foreign code"
_SAFE = "take the weights as .safetensors"
_PICKLES = (".pth", ".pt", ".bin", ".ckpt")
# The first part of a name that is found tells the kind.
_KINDS = (
    (".lora_", "a LoRA"),
    ("encoder.downsamples.0.downsamples.", "the VAE of Wan 2.2's 5B model"),
    ("encoder.downsamples.0.residual.", "Wan's VAE"),
    ("encoder.down_blocks.0.conv1.", "Wan's VAE"),
    ("encoder.down.0.block.", "the VAE of an image model such as Stable Diffusion"),
    ("encoder.down_blocks.0.resnets.", "the VAE of an image model such as Stable Diffusion"),
    ("blocks.0.self_attn.", "Wan's DiT"),
    ("blocks.0.attn1.", "Wan's DiT"),
    ("blocks.0.ffn.gate.", "a umT5 encoder"),
    (".SelfAttention.", "a T5 or umT5 encoder"),
    ("visual.transformer.", "a CLIP image encoder"),
    ("embeddings.patch_embedding.", "a CLIP image encoder"),
    ("text_model.embeddings.", "a CLIP text encoder"),
    ("down_blocks.0.resnets.", "a UNet"),
)


def kind_of(names: Iterable[str]) -> str:
    """Say in words what kind of network weights of these names are."""
    names = list(names)
    for part, kind in _KINDS:
        if any(part in name for name in names):
            return kind
    return f"another network (its first weight is {names[0]})" if names else "empty"


def refusal(error: Exception, weights: Weights, what: str, mend: str) -> ModelError:
    """Return the line in which weights are refused that a library could not load.

    Args:
        error: what it raised.
        weights: where they lie.
        what: the kind of network that was to be loaded, with its article.
        mend: what to do about it.
    """
    where = weights.path or weights.hub or ""
    try:
        folder = weights.path is not None and Path(weights.path).is_dir()
        if folder and any(file.suffix in _PICKLES for file in weights_files(weights)):
            local_state(weights)  # says which file, and what is the matter with it
    except ModelError as fault:
        return fault
    if isinstance(error, pickle.UnpicklingError):
        return ModelError(_CODE, where=where, mend=_SAFE)
    return ModelError(f"cannot be loaded as {what} ({first_line(error)})", where=where, mend=mend)


def local_config(weights: Weights) -> dict[str, Any] | None:
    """Return what config.json of a local network says.

    A single file has one only where `config` names it: beside Wan's original files lies the
    config.json of its DiT.

    Returns:
        None for a single file without one.

    Raises:
        ModelError: it is missing or cannot be read.
    """
    if not Path(weights.path or "").is_file():
        weights_files(weights)  # names what is missing
    elif weights.config is None:
        return None
    path = config_file(weights)
    assert path is not None
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no table")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"is no configuration of a network ({first_line(error)})", where=path, mend=_COPY
        ) from None
    return found


def is_config_of(config: dict[str, Any], names: Iterable[str]) -> bool:
    """Whether a configuration is of one of these classes or model types; an empty one is of any."""
    own = [config.get("_class_name"), config.get("model_type")]
    return not any(own) or any(name in own for name in names)


def local_state(weights: Weights) -> State:
    """Read all weights of a local folder or single file, without copying them into memory.

    Returns:
        Tensors by name, on the CPU, mapped from the files where their format allows.

    Raises:
        ModelError: something is missing, damaged, or not a file of tensors.
    """
    path = Path(weights.path or "")
    if path.is_file():
        return _read(path)
    state: State = {}
    for file in weights_files(weights)[1:]:
        if file.suffix != ".json":
            state |= _read(file)
    return state


def _read(path: Path) -> State:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"is cut short or no .safetensors file ({first_line(error)})",
                where=path,
                mend=_COPY,
            ) from None
    if path.suffix not in _PICKLES:
        raise ModelError(
            "is no file of weights",
            where=path,
            mend="name a folder, a .safetensors file or a .pth file",
        )
    return _tensors(_unpickled(path), path)


def _unpickled(path: Path) -> Any:
    try:
        whole = zipfile.is_zipfile(path)
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if whole or not zipped:
            # Files of torch before 1.6 are no archives and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=whole)
    except pickle.UnpicklingError as error:
        if whole or "GLOBAL" in str(error):  # a function or class that it would call
            raise ModelError(
                _CODE,
                where=path,
                mend=_SAFE,
            ) from None
    except OSError as error:
        raise ModelError(
            f"cannot be read ({error.strerror})", where=path, mend="check the file's permissions"
        ) from None
    except (ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError):
        pass  # what a damaged file says is of no help
    raise ModelError("is cut short or no PyTorch file", where=path, mend=_COPY)


def _tensors(found: Any, path: Path) -> State:
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ModelError(
            "holds no table of weights", where=path, mend="name the file of one network"
        )
    return found


def build(make: Callable[[], Any], *, where: str) -> Any:
    """Build a network from its configuration, without memory for weights, which `fill` brings.

    Raises:
        ModelError: the configuration describes none.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # each library has its own for this
        raise ModelError(
            f"has a configuration that no network can have ({first_line(error)})",
            where=where,
            mend=_COPY,
        ) from None


def fill(network: torch.nn.Module, state: State, *, kind: str, where: str, mend: str) -> None:
    """Give a network, built on the meta device, its weights: all of them and no others.

    Args:
        network: what shall hold them; without gradients afterwards.
        state: tensors by the network's own names; taken as they are, in their own number format.
        kind: what the network is, in words.
        where: the file or folder.
        mend: what to name instead.

    Raises:
        ModelError: a weight is missing, unknown, or of another shape.
    """
    expected = network.state_dict()
    faults = (
        [f"lacks {name}" for name in expected if name not in state]
        + [f"holds {name}, which it should not" for name in state if name not in expected]
        + [
            f"has {name} of shape {list(state[name].shape)} instead of {list(value.shape)}"
            for name, value in expected.items()
            if name in state and state[name].shape != value.shape
        ]
    )
    if faults:
        more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
        raise ModelError(f"is not a whole {kind}: it {faults[0]}{more}", where=where, mend=mend)
    network.requires_grad_(False)
    network.load_state_dict(state, strict=True, assign=True)
