"""Weights of a network from a folder, a single file or the hub, checked before use.

If a file lacks weights, libraries fill in random ones or fail with a message about meta tensors.
Here a network gets exactly the weights of its files, or a one-line error.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from latentmake.base import atomic
from latentmake.base.errors import ModelError, first_line
from latentmake.config.weights import Weights
from latentmake.formats import cachefile
from latentmake.models.checkpoints import prefix_of
from latentmake.models.files import checkpoint_of, network_config, projection_file, weights_files
from latentmake.models.tensors import T5, faults, replaced

State = dict[str, torch.Tensor]
Network = TypeVar("Network", bound=torch.nn.Module)


def load_network(
    weights: Weights,
    network: Any,
    name: str,
    *,
    models: Sequence[str],
    hint: str,
    converted: Callable[[State], State],
    inferred: Callable[[State], dict[str, Any]],
    foreign: str = "(?!)",
    original: bool = True,
) -> Any:
    """Load a network on the CPU, in the dtype of its files if they are local; raises ModelError.

    Args:
        weights: location of the weights. A single file may have the names of the library or of the
            original release.
        network: class of the network in diffusers or transformers.
        name: name of the network in messages.
        models: class names or model types that config.json may state.
        hint: hint of the error, which says where to find the weights.
        converted: function that gives weights the library's names and drops weights of other
            parts.
        inferred: function that derives the configuration from the shapes of converted weights.
        foreign: pattern of the names of weights that belong to other parts of a hub's model.
        original: whether a single file may be from Wan's original release. The config.json beside
            it describes the DiT, so it is not read.
    """
    with refusing(weights, name, hint):
        if weights.hub is not None:
            place: dict[str, Any] = {"foreign": foreign, "revision": weights.revision}
            return complete(network, weights.hub, subfolder=weights.subfolder or "", **place)
        weights_files(weights, original=original)  # raises an error that names missing files
        config = None
        if not original or weights.config is not None or Path(weights.path or "").is_dir():
            config = network_config(weights)
        own = [*filter(None, map((config or {}).get, ("_class_name", "model_type")))]
        if own and not set(own) & set(models):
            raise ValueError(f"it is {own[0]}, not {models[0]}")
        state = converted(local_state(weights))
        built = without_weights(network, config or inferred(state))
        fill(built, state)
    return built


def without_weights(network: Any, config: dict[str, Any]) -> Any:
    """Build a network of diffusers or transformers on the meta device; raises ValueError."""
    try:
        with torch.device("meta"):
            if hasattr(network, "from_config"):
                return network.from_config(config)
            from transformers.initialization import no_init_weights

            # The configuration of a complete CLIP has one section for each of its networks.
            section = config.get(network.config_class.base_config_key, config)
            # To draw random values on the meta device, torch would need its compiler.
            with no_init_weights():
                return network(network.config_class.from_dict(section))
    except Exception as error:  # the libraries raise errors of many types
        what = "has a configuration that no network can have"
        raise ValueError(f"{what}: {first_line(error)}") from None


UMT5 = {r"^encoder\.": ""} | {
    ("^" if own.startswith("^") else "") + re.escape(other): own.removeprefix("^")
    for own, other in T5.items()
}
"""Pattern in the names of Wan's umT5 -> transformers' name. Files of complete models prefix the
names with `encoder.`."""


def renamed(state: State, names: Mapping[str, str]) -> State:
    """Rename weights; see `replaced`."""
    return {replaced(name, names): value for name, value in state.items()}


def complete(network: Any, place: str, *, foreign: str = "", **options: Any) -> Any:
    """Load a network from a hub id or a folder by its library's `from_pretrained`.

    The files may also contain weights whose names begin with a match of `foreign`.

    Raises:
        ValueError: weights are missing, which the library would fill in, or unknown, which it would
            drop.
    """
    loaded, info = network.from_pretrained(place, output_loading_info=True, **options)
    tied = getattr(loaded, "all_tied_weights_keys", None) or ()
    missing = [name for name in info["missing_keys"] if name not in tied]
    unknown = [name for name in info["unexpected_keys"] if not re.match(foreign, name)]
    if fault := faults(missing, unknown):
        raise ValueError(f"it {fault}")
    return loaded


@contextmanager
def refusing(weights: Weights, name: str, hint: str) -> Iterator[None]:
    """Turn any error while a network is loaded into a one-line ModelError; `name` is the network's.

    A MemoryError passes unchanged, because it is not the fault of the weights.
    """
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # the libraries raise errors of many types for damaged weights
        what, where = f"cannot be loaded as {name} ({first_line(error)})", weights.path
        raise ModelError(what, where=where or weights.hub or "", hint=hint) from None


def local_state(weights: Weights) -> State:
    """Read all weights of a local folder or single file."""
    path = Path(weights.path or "")
    if path.is_file():
        return read_weights(path)
    state: State = {}
    for file in weights_files(weights)[1:]:
        if file.suffix != ".json":
            state |= read_weights(file)
    return state


def text_state(weights: Weights, network: Any) -> State:
    """Read the weights of a text encoder; from a checkpoint, only its part, renamed.

    Weights from a checkpoint get the names of transformers.
    """
    state, checkpoint = local_state(weights), checkpoint_of(weights)
    if checkpoint is None or not (prefix := prefix_of(checkpoint.part, state)):
        return state
    if prefix.endswith("model."):
        from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

        return dict(convert_open_clip_checkpoint(network, state, prefix=prefix))
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def read_weights(path: Path) -> State:
    """Read the weights of one file, memory-mapped if its format allows; raises ModelError."""
    archive = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be mapped
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except Exception as error:  # the libraries' messages about damaged files do not help users
        kind = ".safetensors" if path.suffix == ".safetensors" else "PyTorch"
        what, hint = f"is cut short or no {kind} file", "copy it again"
        if isinstance(error, OSError) and error.filename:
            what, hint = f"cannot be read ({error.strerror})", "check the file's permissions"
        elif isinstance(error, pickle.UnpicklingError) and (archive or "GLOBAL" in str(error)):
            what = "holds more than tensors, and loading that could run foreign code"
            hint = "take the weights as .safetensors"
        raise ModelError(what, where=path, hint=hint) from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        what, hint = "holds no table of weights", "name the file of one network"
        raise ModelError(what, where=path, hint=hint)
    return content


def fill(network: Any, state: State) -> None:
    """Give a network on the meta device exactly the weights of its state, in their own dtype.

    A tied weight, which has several names, may be in the file only once. Memory-mapped weights stay
    mapped.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape.
    """
    tied: dict[str, str] = getattr(network, "all_tied_weights_keys", None) or {}
    for name, other in tied.items():
        state = {a: state[b] for a, b in ((name, other), (other, name)) if b in state} | state
    expected = network.state_dict()
    odd = (
        f"has {name} of shape {list(state[name].shape)} instead of {list(value.shape)}"
        for name, value in expected.items()
        if name in state and state[name].shape != value.shape
    )
    missing = (name for name in expected if name not in state)
    unknown = (name for name in state if name not in expected)
    if fault := faults(missing, unknown, odd):
        raise ValueError(f"it {fault}")
    network.requires_grad_(False)
    network.load_state_dict(state, strict=True, assign=True)
    if tied:  # names with equal values share one tensor again
        network.tie_weights(missing_keys=set(), recompute_mapping=False)
    for name, buffer in list(network.named_buffers()):
        if name.endswith("position_ids"):  # files do not contain it
            network.get_submodule(name.rpartition(".")[0]).position_ids = torch.arange(
                buffer.shape[-1]
            )[None]


def place(network: Network, device: torch.device, dtype: torch.dtype) -> Network:
    """Move a network to a device for inference; a GPU converts the dtype of the weights itself.

    With float16, the layers that transformers keeps in float32 stay in float32: T5's `wo` would
    overflow.
    """
    names = getattr(network, "_keep_in_fp32_modules", None) or ()
    exact = [
        (parameter, parameter.data)
        for name, module in network.named_modules()
        if dtype == torch.float16 and name.rpartition(".")[2] in names
        for parameter in module.parameters()
    ]
    # `to` of torch's Module: that of diffusers warns about float32 layers, though there are none.
    # A non-blocking copy lets the GPU convert; a blocking one makes the CPU convert.
    on_gpu = device.type == "cuda"
    torch.nn.Module.to(network, device=device, dtype=dtype, non_blocking=on_gpu)
    for parameter, weight in exact:
        parameter.data = weight.to(device=device, dtype=torch.float32, non_blocking=on_gpu)
    return network.eval().requires_grad_(False)


# -- projections ----------------------------------------------------------------------------------


def load_projection(path: str) -> torch.nn.Linear:
    """Load a projection to the width of a UNet's attention, in float32; raises ModelError.

    `path` is the folder of the projection, or a .safetensors file.
    """
    state = read_weights(file := projection_file(path))
    weight, *bias = sorted(state.values(), key=lambda tensor: -tensor.dim()) or [torch.empty(0)]
    if weight.dim() != 2 or [tensor.shape for tensor in bias] not in ([], [weight.shape[:1]]):
        some = ", ".join(sorted(state)[:4])
        what = f"holds {len(state)} tensors ({some}), not one linear layer"
        hint = "name the file of a linear projection; one with code of its own needs "
        hint += "`trust_remote_code: true`, as a text encoder's `projection`"
        raise ModelError(what, where=file, hint=hint)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias))
    layer.load_state_dict(dict(zip(("weight", "bias"), (weight, *bias), strict=False)))
    return layer


def write_projection(layer: torch.nn.Linear, folder: Path) -> None:
    """Write the two files of a projection atomically; raises StorageError."""
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    config = {"_class_name": "Linear", **sizes}
    tensors = {name: values.detach().cpu().float() for name, values in layer.named_parameters()}
    atomic.write(folder / "model.safetensors", cachefile.serialize(tensors, {}))
    atomic.write(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def text_projection(path: str, *, trust_remote_code: bool) -> torch.nn.Module:
    """Load the projection of a text encoder for inference; raises ModelError.

    A pipeline with its own projection class is loaded only with `trust_remote_code`, because the
    Python files in its folder are executed.
    """
    if not trust_remote_code:
        return load_projection(path).eval().requires_grad_(False)
    import diffusers  # takes seconds, and only this branch needs it

    loader: Any = diffusers.DiffusionPipeline  # its functions have no types
    folder = Path(path)
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        names = [name for name, part in index.items() if isinstance(part, list)]
        (name,) = (name for name in names if "projection" in name)
        pipeline = loader.from_pretrained(
            str(folder),
            custom_pipeline=str(folder),
            trust_remote_code=True,
            local_files_only=True,
            dtype=torch.float32,
            **{other: None for other in names if other != name},  # do not load other parts
        )
        layer: torch.nn.Module = getattr(pipeline, name)
        return layer.eval().requires_grad_(False)
    except Exception as error:  # foreign code may raise anything
        what = f"its projection cannot be loaded ({first_line(error)})"
        hint = "name the folder of a diffusers pipeline with pipeline.py and its projection"
        raise ModelError(what, where=folder, hint=hint) from None
