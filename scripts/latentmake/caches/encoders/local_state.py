"""Weights of a network from a folder, a single file or the hub, checked before use.

Libraries invent what a file lacks, or fail with words about meta tensors. Here a network gets
exactly the weights that its files hold, or is refused in one line.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.config import Weights
from latentmake.errors import ModelError, first_line
from latentmake.models import weight_kinds
from latentmake.models.files import config_file, weights_files
from latentmake.models.weight_kinds import PICKLES

__all__ = [
    "LOAD_FAULTS",
    "Kind",
    "State",
    "load_network",
    "pretrained",
    "refusal",
    "refuse_faults",
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
"""Errors of libraries that load damaged or incomplete weights, or those of another network."""

_COPY = "copy it again"
_CODE = "holds more than tensors, and loading that could run foreign code"
_SAFE = "take the weights as .safetensors"


class Kind(NamedTuple):
    """A kind of network, and how its weights become one.

    Attributes:
        name: in messages.
        from_pretrained: of its class in diffusers or transformers.
        models: class names or model types that its config.json may state.
        content: kind of weights that hold it.
        hint: where to find it.
        convert: gives weights the library's names, and drops those of other parts.
        infer: reads the configuration off the shapes of converted weights.
        build: makes the network of a configuration.
        foreign: pattern of weights that belong to other parts of a hub's model.
    """

    name: str
    from_pretrained: Callable[..., Any]
    models: tuple[str, ...]
    content: weight_kinds.Kind
    hint: str
    convert: Callable[[State], State]
    infer: Callable[[State], dict[str, Any]]
    build: Callable[[dict[str, Any]], Any]
    foreign: str


def load_network(kind: Kind, weights: Weights) -> Any:
    """Load a network on the CPU, in the number format of its files where they are local.

    Args:
        kind: of network.
        weights: a folder or a hub id as the library saves it, or a single file in the library's
            names or the original release's.

    Raises:
        ModelError: it is missing, damaged, incomplete, or of another kind.
    """
    try:
        if weights.hub is not None:
            return pretrained(kind.from_pretrained, weights, foreign=kind.foreign)
        config = _local_config(weights)
        own = [] if config is None else [config.get("_class_name"), config.get("model_type")]
        if any(own) and not set(own) & set(kind.models):
            raise ValueError(f"it is {own[0] or own[1]}, not {kind.models[0]}")
        state = _local_state(weights)
        found = [content for content, _ in weight_kinds.kinds_of(state)]
        if not found or found[0] != kind.content:
            raise ValueError(f"it is a {found[0]}" if found else _unknown(state))
        state = kind.convert(state)
        network = _built(kind, kind.infer(state) if config is None else config)
        _fill(network, state)
    except LOAD_FAULTS as error:
        raise refusal(error, weights, kind.name, kind.hint) from None
    return network


def pretrained(
    from_pretrained: Callable[..., Any], weights: Weights, *, foreign: str = "", **options: Any
) -> Any:
    """Load a network by its library's `from_pretrained`, from the hub or a local folder.

    Args:
        from_pretrained: of its class.
        weights: where they are.
        foreign: pattern of further weights that the files may hold; "" matches all.
        options: for `from_pretrained`.

    Raises:
        ValueError: the library would invent missing weights or drop unknown ones.
    """
    place: dict[str, Any] = {"local_files_only": True}
    if weights.hub is not None:
        place = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
    network, info = from_pretrained(
        weights.hub or weights.path, output_loading_info=True, **place, **options
    )
    tied = getattr(network, "all_tied_weights_keys", None) or ()
    missing = [each for each in info["missing_keys"] if each not in tied]
    unknown = [each for each in info["unexpected_keys"] if not re.match(foreign, each)]
    refuse_faults(missing, unknown)
    return network


def refuse_faults(
    missing: Iterable[str], unknown: Iterable[str] = (), others: Iterable[str] = ()
) -> None:
    """Raise a ValueError that names the first of some faults of weights, if there are any."""
    faults = [
        *(f"lacks {name}" for name in missing if not name.endswith("position_ids")),
        *(f"holds {name}, which it should not" for name in unknown),
        *others,
    ]
    if faults:
        more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
        raise ValueError(f"it {faults[0]}{more}")


def refusal(error: Exception, weights: Weights, name: str, hint: str) -> ModelError:
    """Return the one-line error for weights that a library could not load.

    Args:
        error: raised by the library.
        weights: where they are.
        name: of the kind of network.
        hint: how to repair it.
    """
    where = weights.path or weights.hub or ""
    try:
        folder = weights.path is not None and Path(weights.path).is_dir()
        if folder and any(file.suffix in PICKLES for file in weights_files(weights)):
            _local_state(weights)  # names the file and its fault
    except ModelError as fault:
        return fault
    if isinstance(error, pickle.UnpicklingError):
        return ModelError(_CODE, where=where, mend=_SAFE)
    return ModelError(f"cannot be loaded as {name} ({first_line(error)})", where=where, mend=hint)


def _unknown(names: Iterable[str]) -> str:
    first = next(iter(names), None)
    return f"it is another network (its first weight is {first})" if first else "it is empty"


def _local_config(weights: Weights) -> dict[str, Any] | None:
    """Return the config.json of a local network.

    A single file has one only where `config` names it: beside Wan's original files lies the
    config.json of its DiT.
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


def _local_state(weights: Weights) -> State:
    """Read all weights of a local folder or single file, mapped from it where its format allows."""
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
    if path.suffix not in PICKLES:
        raise ModelError(
            "is no file of weights",
            where=path,
            mend="name a folder, a .safetensors file or a .pth file",
        )
    found = _unpickled(path)
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ModelError(
            "holds no table of weights", where=path, mend="name the file of one network"
        )
    return found


def _unpickled(path: Path) -> Any:
    try:
        archive = zipfile.is_zipfile(path)
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if archive or not zipped:
            # Files of torch before 1.6 are no archives and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        if archive or "GLOBAL" in str(error):  # a function or class that it would call
            raise ModelError(_CODE, where=path, mend=_SAFE) from None
    except OSError as error:
        raise ModelError(
            f"cannot be read ({error.strerror})", where=path, mend="check the file's permissions"
        ) from None
    except (ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError):
        pass  # messages about damaged files help nobody
    raise ModelError("is cut short or no PyTorch file", where=path, mend=_COPY)


def _built(kind: Kind, config: dict[str, Any]) -> Any:
    """Build a network from its configuration, without memory for its weights."""
    try:
        with torch.device("meta"):
            return kind.build(config)
    except Exception as error:  # each library has its own for this
        raise ValueError(
            f"has a configuration that no network can have: {first_line(error)}"
        ) from None


def _fill(network: torch.nn.Module, state: State) -> None:
    """Give a network on the meta device exactly its weights, in their own number format."""
    expected = network.state_dict()
    refuse_faults(
        (name for name in expected if name not in state),
        (name for name in state if name not in expected),
        (
            f"has {name} of shape {list(state[name].shape)} instead of {list(value.shape)}"
            for name, value in expected.items()
            if name in state and state[name].shape != value.shape
        ),
    )
    network.requires_grad_(False)
    network.load_state_dict(state, strict=True, assign=True)
