"""Weights of a network from a folder, a single file or the hub, checked before use.

Libraries invent what a file lacks, or fail with words about meta tensors. Here a network gets
exactly the weights that its files hold, or is refused in one line.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from latentmake.config.weights import Weights
from latentmake.errors import ModelError, first_line
from latentmake.files import atomic, cachefile
from latentmake.models.checkpoints import prefix_of
from latentmake.models.files import network_config, projection_file, weights_files
from latentmake.models.headers import part_of
from latentmake.models.tensors import T5, faults

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
        weights: where it is; a single file may have the library's names or the original release's.
        network: its class in diffusers or transformers.
        name: in messages.
        models: class names or model types that its config.json may state.
        hint: where to find it.
        converted: gives weights the library's names, and drops those of other parts.
        inferred: reads the configuration off the shapes of converted weights.
        foreign: pattern of weights that belong to other parts of a hub's model.
        original: whether a single file may be Wan's original release, beside which lies the
            config.json of its DiT.
    """
    with refusing(weights, name, hint):
        if weights.hub is not None:
            return pretrained(network, weights, foreign=foreign)
        weights_files(weights, original=original)  # names what is missing
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

            part = config.get(network.config_class.base_config_key, config)  # of a whole CLIP
            with no_init_weights():  # to draw values on this device takes torch's compiler
                return network(network.config_class.from_dict(part))
    except Exception as error:  # each library has its own for this
        what = "has a configuration that no network can have"
        raise ValueError(f"{what}: {first_line(error)}") from None


UMT5 = {r"^encoder\.": ""} | {
    "^" * own.startswith("^") + re.escape(other): own.removeprefix("^") for own, other in T5.items()
}
"""Patterns in the names of Wan's umT5, which files of complete models prefix with `encoder.`."""


def renamed(state: State, names: Mapping[str, str]) -> State:
    """Rename weights: replace patterns in their names, one after the other."""
    found = state
    for pattern, replacement in names.items():
        found = {re.sub(pattern, replacement, name): value for name, value in found.items()}
    return found


def pretrained(network: Any, weights: Weights, *, foreign: str = "", **options: Any) -> Any:
    """Load a network from the hub by its library's `from_pretrained`.

    Weights whose names match `foreign` may be in the files, too.

    Raises:
        ValueError: the library would invent missing weights or drop unknown ones.
    """
    options |= {"revision": weights.revision, "subfolder": weights.subfolder or ""}
    loaded, info = network.from_pretrained(weights.hub, output_loading_info=True, **options)
    tied = getattr(loaded, "all_tied_weights_keys", None) or ()
    missing = [each for each in info["missing_keys"] if each not in tied]
    unknown = [each for each in info["unexpected_keys"] if not re.match(foreign, each)]
    refuse_faults(missing, unknown)
    return loaded


def refuse_faults(
    missing: Iterable[str], unknown: Iterable[str] = (), others: Iterable[str] = ()
) -> None:
    """Raise a ValueError that names the first of some faults of weights, if there are any."""
    if fault := faults(missing, unknown, others):
        raise ValueError(f"it {fault}")


@contextmanager
def refusing(weights: Weights, name: str, hint: str) -> Iterator[None]:
    """Turn any error while loading weights of a kind of network, `name`, into one line."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # each library has its own for damaged weights
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
    """Read the weights of a text encoder; of a checkpoint its part's, in transformers' names."""
    state, part = local_state(weights), part_of(weights)
    if not (prefix := part and prefix_of(part, state)):
        return state
    if prefix.endswith("model."):
        from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

        return dict(convert_open_clip_checkpoint(network, state, prefix=prefix))
    return {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)}


def read_weights(path: Path) -> State:
    """Read the weights of one file, mapped from it where its format allows; raises ModelError."""
    archive = zipfile.is_zipfile(path)  # files of torch before 1.6 are none and cannot be mapped
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except Exception as error:  # messages about damaged files help nobody
        kind = ".safetensors" if path.suffix == ".safetensors" else "PyTorch"
        what, hint = f"is cut short or no {kind} file", "copy it again"
        if isinstance(error, OSError) and error.filename:
            what, hint = f"cannot be read ({error.strerror})", "check the file's permissions"
        elif isinstance(error, pickle.UnpicklingError) and (archive or "GLOBAL" in str(error)):
            what = "holds more than tensors, and loading that could run foreign code"
            hint = "take the weights as .safetensors"
        raise ModelError(what, where=path, hint=hint) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        what, hint = "holds no table of weights", "name the file of one network"
        raise ModelError(what, where=path, hint=hint)
    return found


def fill(network: Any, state: State) -> None:
    """Give a network on the meta device exactly its weights, in their own dtype.

    Files may hold a weight of several names once. What is mapped from a file stays so.
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
    refuse_faults(
        (x for x in expected if x not in state), (x for x in state if x not in expected), odd
    )
    network.requires_grad_(False)
    network.load_state_dict(state, strict=True, assign=True)
    if tied:  # to one tensor, if they are equal
        network.tie_weights(missing_keys=set(), recompute_mapping=False)
    for name, buffer in list(network.named_buffers()):
        if name.endswith("position_ids"):  # in no file
            network.get_submodule(name.rpartition(".")[0]).position_ids = torch.arange(
                buffer.shape[-1]
            )[None]


def place(network: Network, device: torch.device, dtype: torch.dtype) -> Network:
    """Move a network for inference; a GPU gets weights as the file has them, and converts them.

    Beside float16, layers that transformers keeps in float32 stay there: T5's `wo` overflows.
    """
    names = getattr(network, "_keep_in_fp32_modules", None) or ()
    exact = [
        (parameter, parameter.data)
        for name, module in network.named_modules()
        if dtype == torch.float16 and name.rpartition(".")[2] in names
        for parameter in module.parameters()
    ]
    # Module's own `to`: diffusers' warns about layers to keep in float32, of which there are none.
    on_gpu = device.type == "cuda"  # else it is the CPU that converts, at a blocking copy
    torch.nn.Module.to(network, device=device, dtype=dtype, non_blocking=on_gpu)
    for parameter, weight in exact:
        parameter.data = weight.to(device=device, dtype=torch.float32, non_blocking=on_gpu)
    return network.eval().requires_grad_(False)


# -- projections ----------------------------------------------------------------------------------


def load_projection(path: str) -> torch.nn.Linear:
    """Load a projection in float32, to the width of a UNet's attention; raises ModelError.

    `path` is its folder, or one .safetensors file.
    """
    state = read_weights(file := projection_file(path))
    weight, *bias = sorted(state.values(), key=lambda each: -each.dim()) or [torch.empty(0)]
    if weight.dim() != 2 or [each.shape for each in bias] not in ([], [weight.shape[:1]]):
        some = ", ".join(sorted(state)[:4])
        what = f"holds {len(state)} tensors ({some}), not one linear layer"
        hint = "name the file of a linear projection; one with code of its own needs "
        hint += "`trust_remote_code: true`, as a text encoder's `projection`"
        raise ModelError(what, where=file, hint=hint)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias))
    layer.load_state_dict(dict(zip(("weight", "bias"), (weight, *bias), strict=False)))
    return layer


def write_projection(layer: torch.nn.Linear, folder: Path) -> None:
    """Write a projection, each file atomically; raises StorageError."""
    config = {
        "_class_name": "Linear",
        "in_features": layer.in_features,
        "out_features": layer.out_features,
    }
    tensors = {name: each.detach().cpu().float() for name, each in layer.named_parameters()}
    atomic.write(folder / "model.safetensors", cachefile.serialize(tensors, {}))
    atomic.write(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def text_projection(path: str, *, trust_remote_code: bool) -> torch.nn.Module:
    """Load the projection of a text encoder for inference; raises ModelError.

    A pipeline with a projection class of its own is loaded with the Python files in its folder, and
    only with `trust_remote_code`.
    """
    layer: torch.nn.Module
    if not trust_remote_code:
        layer = load_projection(path)
        return layer.eval().requires_grad_(False)
    import diffusers  # seconds of import, for this alone

    loader: Any = diffusers.DiffusionPipeline  # which has no types
    folder = Path(path)
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        names = [name for name, each in index.items() if isinstance(each, list)]
        (name,) = (each for each in names if "projection" in each)
        pipeline = loader.from_pretrained(
            str(folder),
            custom_pipeline=str(folder),
            trust_remote_code=True,
            local_files_only=True,
            dtype=torch.float32,
            **{each: None for each in names if each != name},
        )
        layer = getattr(pipeline, name)
        return layer.eval().requires_grad_(False)
    except Exception as error:  # code of others may fail in any way
        what = f"its projection cannot be loaded ({first_line(error)})"
        hint = "name the folder of a diffusers pipeline with pipeline.py and its projection"
        raise ModelError(what, where=folder, hint=hint) from None
