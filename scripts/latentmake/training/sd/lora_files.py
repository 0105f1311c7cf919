"""Files of a trained LoRA of a UNet, for diffusers, and for A1111, Forge, ComfyUI and sd-scripts.

Both hold the same float32 numbers; the LoRA adds alpha / rank * up @ down to a layer's weight.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `unet.mid_block.attentions.0.proj_in.lora_A.weight` | metadata | peft |
| kohya | `lora_unet_mid_block_attentions_0_proj_in.lora_down.weight` | `.alpha` | sd-scripts |

sd-scripts' `networks/lora.py` makes its names of the path of a layer in diffusers' UNet, and for
SDXL in the UNet of the original release.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

from latentmake.config.weights import Weights
from latentmake.errors import CacheError, ModelError
from latentmake.files import atomic
from latentmake.models.files import network_config
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.init_lora import Place
from latentmake.training.lora import ADAPTER, kohya_bytes, lora_bytes
from latentmake.training.order import caption_in
from latentmake.training.sd.order import KOHYA_WEIGHTS, LORA_WEIGHTS, SdOrder
from latentmake.training.sd.unet import PLACES, PREFIX, is_xl, kohya_place, read_schedule

_V2_WIDTH = 1024  # of the text embeddings that the UNets of Stable Diffusion 2.x take
# diffusers' names of SDXL's layers -> those of its release; in a block, and its number.
_XL_LAYERS = {
    r"mid_block\.attentions\.0": "middle_block.1",
    r"mid_block\.resnets\.0": "middle_block.0",
    r"mid_block\.resnets\.1": "middle_block.2",
    r"conv1$": "in_layers.2",
    r"conv2$": "out_layers.3",
    r"time_emb_proj$": "emb_layers.1",
    r"conv_shortcut$": "skip_connection",
}
_network: Any = UNet2DConditionModel  # diffusers has no types
_NAMES: dict[str, dict[str, str]] = DIFFUSERS_TO_LDM_MAPPING["unet"]


def write_lora(unet: Any, folder: Path, described: Mapping[str, str]) -> None:
    """Write the LoRA of a UNet into a folder, as two files; the same LoRA, the same bytes.

    Args:
        unet: with a LoRA, on any device.
        folder: it exists.
        described: further metadata of the file in kohya's names, see `describe`.
    """
    config = unet.peft_config[ADAPTER]
    known = {"ss_network_dim": str(config.r), "ss_network_alpha": str(float(config.lora_alpha))}
    kohya = kohya_bytes(unet, places_of(unet)[1], {**described, **known})
    atomic.write(folder / LORA_WEIGHTS, lora_bytes(unet, PREFIX))
    atomic.write(folder / KOHYA_WEIGHTS, kohya)


def places_of(unet: Any) -> tuple[Place, Place]:
    """Return what is before the names of a layer's matrices in diffusers' and kohya's files."""
    if not is_xl(unet.config):
        return PLACES
    layers = unet.config.layers_per_block
    return PLACES[0], lambda layer: kohya_place(xl_layer(layer, layers))


def xl_layer(layer: str, layers: int) -> str:
    """Return the name in SDXL's release of a layer of a diffusers UNet with `layers` a block.

    Source: `make_unet_conversion_map` of sd-scripts' library/sdxl_model_util.py.
    """
    outside = {**_NAMES["layers"], **_NAMES["addition_embed_type"]}
    if name := outside.get(f"{layer}.weight"):
        return name.removesuffix(".weight")
    places = {"resnets": (0, 0), "attentions": (0, 1)}
    places |= {"downsamplers": (layers, 0), "upsamplers": (layers, 2)}

    def block(match: re.Match[str]) -> str:
        half, number, part, index = match.groups()
        (offset, inner), first = places[part], int(half == "down")
        at = first + int(number) * (layers + 1) + int(index) + offset
        return f"{'input' if first else 'output'}_blocks.{at}.{inner}"

    layer = re.sub(r"downsamplers\.0\.conv$", "downsamplers.0.op", layer)
    layer = re.sub(r"^(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)", block, layer)
    for pattern, name in _XL_LAYERS.items():
        layer = re.sub(pattern, name, layer)
    return layer


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
    return path.parent.name if path.name == PREFIX else path.name


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
    second = config.get("cross_attention_dim") == _V2_WIDTH
    v = prediction == "v_prediction"
    version = f"sd_v{2 if second else 1}{'_v' if v else ''}"
    kind = ("v2-768-v" if v else "v2-512") if second else "v1"
    if is_xl(config):
        version, kind = "sdxl_base_v1-0", "xl-v1-base"
    return {
        "ss_base_model_version": version,
        "ss_v2": str(second),
        "modelspec.architecture": f"stable-diffusion-{kind}/lora",
        "modelspec.prediction_type": "v" if v else prediction,
    }
