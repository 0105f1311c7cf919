"""Names of a LoRA's tensors in its file, in the words of any program; no torch here.

| file | key of a layer's down matrix | alpha |
|---|---|---|
| diffusers | `unet.LAYER.lora_A.weight` | metadata; without them the rank |
| diffusers' attention processors | `LAYER.processor.to_q_lora.down.weight` | none: the rank |
| kohya's and others | `PLACE.lora_down.weight` | `PLACE.alpha`; without it the rank |

PLACE is a program's own name of the layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from latentmake.errors import TrainingError, first_line
from latentmake.files.safetensors import read_head

Place = Callable[[str], str]
"""Returns what is before the names of a layer's matrices in a file, of its name in diffusers."""

_METADATA = "lora_adapter_metadata"  # diffusers' LORA_ADAPTER_METADATA_KEY
_SAME = {
    # Those of diffusers' attention processors; source: its utils/state_dict_utils.py.
    **{".processor.": ".", ".to_out_lora.": ".to_out.0.lora."},
    **{f".to_{part}_lora.": f".to_{part}.lora." for part in "qkv"},
    **{".lora_down.": ".lora_A.", ".lora_up.": ".lora_B."},  # kohya's
    **{".lora.down.": ".lora_A.", ".lora.up.": ".lora_B."},  # diffusers' before peft
}
_SCALES = ("alpha_pattern", "rank_pattern", "use_rslora")  # of peft


def tensor_names(
    file: Path, layers: Collection[str], rank: int, places: Sequence[Place]
) -> tuple[dict[str, str], float]:
    """Find a LoRA of this rank on these layers in a file, by its header.

    `layers` have their names in diffusers, and the shapes of their weights if these are known;
    `places` are of each program that may have written it.

    Returns:
        Name in peft of each matrix, and of each layer's alpha where there is one, -> name in the
        file; alpha of the other layers.

    Raises:
        OSError: the file is missing.
        ValueError: it is damaged, or has another rank or other layers.
    """
    head = read_head(file)
    found = _renamed(head.entries)
    place = max(places, key=lambda each: sum(f"{each(x)}.lora_A.weight" in found for x in layers))
    alphas = {f"{place(layer)}.alpha": f"{layer}.alpha" for layer in layers}
    ends = ("lora_A.weight", "lora_B.weight")
    wanted = {f"{place(layer)}.{end}": f"{layer}.{end}" for layer in layers for end in ends}
    for name in sorted(wanted.keys() ^ (found.keys() - alphas.keys())):
        raise ValueError(f"only the {'network' if name in wanted else 'file'} has {name}")
    held = head.tensors
    ranks = {(*held[found[x]].shape, 0)[0] for x in wanted if x.endswith(ends[0])}
    if ranks != {rank}:
        raise ValueError(f"it has the rank {', '.join(map(str, sorted(ranks)))} in place of {rank}")
    for name, own in wanted.items():
        layer, _, end = own.removesuffix(".weight").rpartition(".")
        shape = layers.get(layer) if isinstance(layers, Mapping) else None
        at = int(end == "lora_A")  # A has the layer's inputs, B its outputs
        if shape and (width := held[found[name]].shape[at : at + 1]) != shape[at : at + 1]:
            what = f"{found[name]} is {', '.join(map(str, width)) or 0} wide, not {shape[at]}"
            raise ValueError(f"it is of another network: {what}")
    described = json.loads(head.metadata.get(_METADATA, "{}")).items()
    if odd := [key for key, value in described if value and key.endswith(_SCALES)]:
        raise ValueError(f"its layers have scales of their own ({odd[0]})")
    alpha = next((float(value) for key, value in described if key.endswith(".lora_alpha")), rank)
    return {own: found[name] for name, own in (wanted | alphas).items() if name in found}, alpha


def _renamed(names: Iterable[str]) -> dict[str, str]:
    """Return a file's names by those that peft would have in their place."""
    found = {name: name for name in names}
    for old, new in _SAME.items():
        found = {name.replace(old, new): own for name, own in found.items()}
    return found


def sizes_of(file: Path, prefix: str) -> tuple[int, float, list[str]]:
    """Return rank, alpha and layers of a LoRA in one of diffusers' names, by its header.

    `prefix` is the pipeline's name for the network, which is before the layers, or is not.

    Raises:
        OSError: the file is missing.
        ValueError, LookupError: it is damaged, or in other names.
    """
    head = read_head(file)
    if _METADATA in head.metadata:
        content = json.loads(head.metadata[_METADATA])
        keys = ("r", "lora_alpha", "target_modules")
        rank, alpha, layers = (content[f"{prefix}.{key}"] for key in keys)
        return rank, alpha, layers
    end = ".lora_A.weight"
    downs = {x: own for x, own in _renamed(head.entries).items() if x.endswith(end)}
    if not downs:
        raise ValueError("it is no LoRA in the names of diffusers")
    ((rank, *_), *_) = (head.tensors[own].shape for own in downs.values())
    return rank, rank, sorted(x.removesuffix(end).removeprefix(f"{prefix}.") for x in downs)


def misfit(error: Exception, file: Path, where: str) -> TrainingError:
    """Return the error of a LoRA that a training cannot begin from."""
    hint = "its rank must be `rank`, and its layers those of `target_modules`"
    fault = first_line(error)
    if isinstance(error, OSError):
        hint = "name the file of a LoRA, or the folder of a run that is trained"
        fault = error.strerror or fault
    what = f"{file} cannot be begun from ({fault})"
    return TrainingError(what, where=f"{where}.init_lora", hint=hint)
