"""Files of a trained LoRA of a UNet, for diffusers, and for A1111, Forge, ComfyUI and sd-scripts.

Both hold the same float32 numbers; the LoRA adds alpha / rank * up @ down to a layer's weight.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `unet.mid_block.attentions.0.proj_in.lora_A.weight` | metadata | peft |
| kohya | `lora_unet_mid_block_attentions_0_proj_in.lora_down.weight` | `.alpha` | sd-scripts |

sd-scripts' `networks/lora.py` makes its names of the path of a layer in diffusers' UNet.

Files of before have diffusers' older names `.lora.down.` and `.lora.up.` for attention, and peft's
for all other layers. diffusers decides by the first key of a file how to read all of them.

`complete` rewrites such files of a finished training, and writes the file in kohya's names where it
is missing. No step is trained.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake import digest
from latentmake.config.weights import Weights
from latentmake.errors import CacheError, ModelError, TrainingError, first_line
from latentmake.files import atomic, cachefile
from latentmake.files.safetensors import read_head
from latentmake.models.files import network_config
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.loop.result import COPIED, LORA_WEIGHTS, Record, RunFiles, wanted
from latentmake.training.lora import ADAPTER, kohya_tensors, layers_of, lora_bytes, lora_tensors
from latentmake.training.order import Wanted, caption_in
from latentmake.training.sd.order import KOHYA_WEIGHTS, SdOrder
from latentmake.training.sd.unet import read_schedule

_PREFIX = "unet"  # in diffusers' pipelines
_OLD = {".lora.down.": ".lora_A.", ".lora.up.": ".lora_B."}
_V2_WIDTH = 1024  # of the text embeddings that the UNets of Stable Diffusion 2.x take
_network: Any = UNet2DConditionModel  # diffusers has no types


def write_lora(unet: Any, folder: Path, described: Mapping[str, str]) -> None:
    """Write the LoRA of a UNet into a folder, as two files; the same LoRA, the same bytes.

    Args:
        unet: with a LoRA, on any device.
        folder: it exists.
        described: see `describe`.
    """
    tensors = lora_tensors(unet)
    atomic.write(folder / LORA_WEIGHTS, lora_bytes(unet, _PREFIX, tensors))
    alpha = float(unet.peft_config[ADAPTER].lora_alpha)
    atomic.write(folder / KOHYA_WEIGHTS, _kohya_bytes(tensors, alpha, described))


def read_lora(unet: Any, file: Path) -> None:
    """Put back a LoRA that `write_lora` or an earlier release wrote.

    Raises:
        KeyError: it is of another network.
        OSError: it cannot be read.
        RuntimeError: it is of another network.
        SafetensorError: it is damaged.
    """
    state = _load(file)
    with torch.no_grad():
        for name, value in lora_tensors(unet).items():
            value.copy_(state[name])


def _load(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA of any release, by peft's names."""
    found = {}
    for name, value in load_file(file).items():
        for old, new in _OLD.items():
            name = name.replace(old, new)
        found[name.removeprefix(f"{_PREFIX}.")] = value
    return found


def _kohya_bytes(
    tensors: Mapping[str, torch.Tensor], alpha: float, described: Mapping[str, str]
) -> bytes:
    """Return the file in kohya's names.

    Args:
        tensors: of the LoRA, by peft's names.
        alpha: of the LoRA.
        described: see `describe`.
    """
    places = {name: f"lora_unet_{name.replace('.', '_')}" for name in layers_of(tensors)}
    named = kohya_tensors(tensors, alpha, places)
    rank = next(len(value) for name, value in tensors.items() if "lora_A" in name)
    network = {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
    return cachefile.serialize(named, {"format": "pt", **described, **network})


def describe(order: SdOrder) -> dict[str, str]:
    """Return the metadata that programs show of a LoRA, named as sd-scripts names it.

    The trigger phrase is made of the tags that every caption has.

    Raises:
        TrainingError: the manifest cannot be read.
    """
    counts: dict[str, Counter[str]] = {}
    shared: dict[str, str] | None = None
    for row in rows_of(Path(order.manifest)):
        tags = [tag for part in _caption_of(row).split(",") if (tag := part.strip())]
        if tags:
            known = {tag.lower(): tag for tag in tags}
            counts.setdefault(row.dataset, Counter()).update(tag.lower() for tag in tags)
            shared = {key: tag for key, tag in (shared or known).items() if key in known}
    said = {
        "ss_output_name": order.run,
        "ss_network_module": "networks.lora",
        "ss_sd_model_name": _model_name(order.unet),
        "ss_tag_frequency": json.dumps(counts, ensure_ascii=False),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.implementation": "diffusers",
        "modelspec.title": order.run,
        **_base_model(order),
    }
    if shared:
        said["modelspec.trigger_phrase"] = ", ".join(shared.values())
    return said


def _caption_of(row: Row) -> str:
    """Return the caption of an item; an empty one where it does not train."""
    try:
        return "" if row.validation else caption_in(row.first_text)
    except CacheError:  # removed after it was trained on
        return ""


def _model_name(unet: Weights) -> str:
    """Return the name of a UNet's model, as sd-scripts has it: without its folder."""
    if unet.path is None:
        return unet.hub or ""
    path = Path(unet.path)
    return path.parent.name if path.name == _PREFIX else path.name


def _base_model(order: SdOrder) -> dict[str, str]:
    """Return the kind of the UNet; nothing where its configuration is not at hand."""
    unet = order.unet
    place = {"subfolder": unet.subfolder, "revision": unet.revision}
    try:
        config = network_config(unet) or _network.load_config(unet.hub, **place)
        schedule = read_schedule(order.scheduler, order.trainer.prediction_type, unet)
    except (OSError, ValueError, ModelError):
        return {}
    flows = str(schedule.get("_class_name", "")).startswith("FlowMatch")
    asked = order.trainer.prediction_type or ("flow_matching" if flows else None)
    prediction = asked or schedule.get("prediction_type", "epsilon")
    width = config.get("cross_attention_dim")
    second, v = width == _V2_WIDTH, prediction == "v_prediction"
    kind = ("v2-768-v" if v else "v2-512") if second else "v1"
    return {
        "ss_base_model_version": f"sd_v{2 if second else 1}{'_v' if v else ''}",
        "ss_v2": str(second),
        "modelspec.architecture": f"stable-diffusion-{kind}/lora",
        "modelspec.prediction_type": "v" if v else prediction,
    }


def complete(order: SdOrder) -> None:
    """Rewrite the files of earlier releases, of a finished training and its copies.

    A LoRA that is not there in kohya's names is written in them, last of all: planning looks for
    that file. Copies of an earlier training are not described, for its captions may be others.
    """
    files, want, described = RunFiles(order), wanted(order), describe(order)
    for file in [*sorted(files.saved.glob(f"step-*/{LORA_WEIGHTS}")), files.weights]:
        ours = file == files.weights or Wanted.read(file.with_name(COPIED)) == want
        kohya = file.with_name(KOHYA_WEIGHTS)
        try:
            head = read_head(file)
            tensors = _load(file)
            old = head.entries.keys() - {f"{_PREFIX}.{name}" for name in tensors}
            if old:
                named = {f"{_PREFIX}.{name}": value for name, value in tensors.items()}
                atomic.write(file, cachefile.serialize(named, head.metadata))
            said = json.loads(head.metadata[LORA_ADAPTER_METADATA_KEY])
            alpha = float(said[f"{_PREFIX}.lora_alpha"])
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise unreadable(error, file) from None
        if old or not kohya.is_file():
            atomic.write(kohya, _kohya_bytes(tensors, alpha, described if ours else {}))
            names = "rewritten in peft's names, which diffusers loads whole" if old else "unchanged"
            sys.stderr.write(f"{file}: {names}; {kohya.name} written; no step trained\n")
    record = Record.read(files.record)
    if record is not None and record.files:
        known = record.files | {KOHYA_WEIGHTS: digest.of_file(files.output / KOHYA_WEIGHTS)}
        record.model_copy(update={"files": known}).write(files.record)


def unreadable(error: Exception, file: Path) -> TrainingError:
    """Return the error of trained weights that cannot be read."""
    return TrainingError(
        f"these trained weights cannot be read ({first_line(error)})",
        where=file,
        hint="delete them and run the same command again, which trains them anew",
    )
