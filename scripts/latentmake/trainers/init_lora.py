"""Names of a LoRA's tensors in the files of several programs; this module does not import torch.

| file | key of a layer's down matrix | alpha |
|---|---|---|
| diffusers | `unet.LAYER.lora_A.weight` | metadata; the rank if there is none |
| diffusers' attention processors | `LAYER.processor.to_q_lora.down.weight` | none: the rank |
| kohya's scripts and others | `PLACE.lora_down.weight` | `PLACE.alpha`; the rank if it is missing |

PLACE is the program's own name of the layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from latentmake.base.errors import TrainingError, first_line
from latentmake.formats.safetensors import read_head

Place = Callable[[str], str]
"""Function from a layer's name in diffusers to the prefix of its matrices' names in a file."""

_METADATA = "lora_adapter_metadata"  # diffusers' LORA_ADAPTER_METADATA_KEY
_SAME = {
    # Names of diffusers' attention processors; source: its utils/state_dict_utils.py.
    **{".processor.": ".", ".to_out_lora.": ".to_out.0.lora."},
    **{f".to_{part}_lora.": f".to_{part}.lora." for part in "qkv"},
    **{".lora_down.": ".lora_A.", ".lora_up.": ".lora_B."},  # kohya's
    **{".lora.down.": ".lora_A.", ".lora.up.": ".lora_B."},  # older diffusers', before peft
}
_SCALES = ("alpha_pattern", "rank_pattern", "use_rslora")  # peft's settings of single layers


def tensor_names(
    file: Path, layers: Collection[str], rank: int, places: Sequence[Place]
) -> tuple[dict[str, str], float]:
    """Find the tensors of a LoRA in a file; only its header is read.

    Args:
        file: safetensors file.
        layers: layers that the LoRA must have, by their names in diffusers; perhaps a mapping to
            the shapes of their weights.
        rank: rank that the LoRA must have.
        places: functions that name layers, one for each program that may have written the file.

    Returns:
        A dictionary from peft's name to the name in the file: of each matrix, and of each alpha in
        the file. Then the alpha of all layers that have none of their own.

    Raises:
        OSError: the file is missing.
        ValueError: the file is damaged, or its LoRA has another rank or other layers.
        OverflowError: its alpha is too large.
    """
    head = read_head(file)
    names = _renamed(head.entries)

    def count(place: Place) -> int:
        return sum(f"{place(layer)}.lora_A.weight" in names for layer in layers)

    place = max(places, key=count)
    alphas = {f"{place(layer)}.alpha": f"{layer}.alpha" for layer in layers}
    ends = ("lora_A.weight", "lora_B.weight")
    wanted = {f"{place(layer)}.{end}": f"{layer}.{end}" for layer in layers for end in ends}
    for name in sorted(wanted.keys() ^ (names.keys() - alphas.keys())):
        raise ValueError(f"only the {'network' if name in wanted else 'file'} has {name}")
    held = head.tensors
    downs = (held[names[name]].shape for name in wanted if name.endswith(ends[0]))
    ranks = {shape[0] if shape else 0 for shape in downs}
    if ranks != {rank}:
        raise ValueError(f"it has the rank {', '.join(map(str, sorted(ranks)))} in place of {rank}")
    for name, own in wanted.items():
        layer, _, end = own.removesuffix(".weight").rpartition(".")
        shape = layers.get(layer) if isinstance(layers, Mapping) else None
        at = int(end == "lora_A")  # A has the layer's inputs, B its outputs
        if shape and (width := held[names[name]].shape[at : at + 1]) != shape[at : at + 1]:
            what = f"{names[name]} is {', '.join(map(str, width)) or 0} wide, not {shape[at]}"
            raise ValueError(f"it is of another network: {what}")
    described = json.loads(head.metadata.get(_METADATA, "{}")).items()
    if odd := [key for key, value in described if value and key.endswith(_SCALES)]:
        raise ValueError(f"its layers have scales of their own ({odd[0]})")
    alpha = next((float(value) for key, value in described if key.endswith(".lora_alpha")), rank)
    return {own: names[name] for name, own in (wanted | alphas).items() if name in names}, alpha


def _renamed(names: Iterable[str]) -> dict[str, str]:
    """Return a dictionary from peft's spelling of a file's names to these names."""
    renamed = {name: name for name in names}
    for old, new in _SAME.items():
        renamed = {name.replace(old, new): own for name, own in renamed.items()}
    return renamed


def sizes_of(file: Path, prefix: str) -> tuple[int, float, list[str]]:
    """Return rank, alpha and layers of a LoRA file that has any of diffusers' names.

    Only the header is read. `prefix` is the pipeline's name for the network. Names in the file may
    begin with it or not.

    Raises:
        OSError: the file is missing.
        ValueError, LookupError: the file is damaged, or its names are another program's.
    """
    head = read_head(file)
    if _METADATA in head.metadata:
        content = json.loads(head.metadata[_METADATA])
        keys = ("r", "lora_alpha", "target_modules")
        rank, alpha, layers = (content[f"{prefix}.{key}"] for key in keys)
        return rank, alpha, layers
    end = ".lora_A.weight"
    downs = {name: own for name, own in _renamed(head.entries).items() if name.endswith(end)}
    if not downs:
        raise ValueError("it is no LoRA in the names of diffusers")
    ((rank, *_), *_) = (head.tensors[own].shape for own in downs.values())
    layers = sorted(name.removesuffix(end).removeprefix(f"{prefix}.") for name in downs)
    return rank, rank, layers


def misfit(error: Exception, file: Path, where: str) -> TrainingError:
    """Return the error for a LoRA that a training cannot begin from."""
    hint = "its rank must be `rank`, and its layers those of `target_modules`"
    fault = first_line(error)
    if isinstance(error, OSError):
        hint = "name the file of a LoRA, or the folder of a run that is trained"
        fault = error.strerror or fault
    what = f"{file} cannot be begun from ({fault})"
    return TrainingError(what, where=f"{where}.init_lora", hint=hint)
