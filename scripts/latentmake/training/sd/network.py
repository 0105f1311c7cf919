"""UNet in training: loaded, checked against caches, given what is trained; and its LoRA's files.

Both files hold the same float32 numbers; the LoRA adds alpha / rank * up @ down to a layer's
weight.

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    DIFFUSERS_TO_LDM_MAPPING,
    convert_ldm_unet_checkpoint,
)

from latentmake.caches.encoders.local_state import State, load_network
from latentmake.caches.encoders.projection import load_projection
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.errors import CacheError, ModelError, TrainingError, first_line
from latentmake.files import atomic
from latentmake.models import headers
from latentmake.models.checks import check_kind
from latentmake.models.files import network_config
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.init_lora import Place
from latentmake.training.lora import ADAPTER, add_adapter, kohya_bytes, lora_bytes
from latentmake.training.order import caption_in
from latentmake.training.sd.unet import (
    KOHYA_WEIGHTS,
    LORA_WEIGHTS,
    NEW,
    PLACES,
    PREFIX,
    XL,
    SdOrder,
    check_conditions,
    check_names,
    is_xl,
    kohya_place,
    parameters_of,
    read_schedule,
)

UNet: TypeAlias = Any  # a UNet2DConditionModel: diffusers and peft have no types
_TOGETHER = "`unet`, `vae` and `text` of the model must come from the same base model"


def load_unet(weights: Weights, architecture: str | None = None) -> UNet:
    """Load a UNet in float32 on the CPU: a diffusers folder, a single file, or from the hub.

    Raises:
        ModelError: it is missing, incomplete, or no UNet of the model's architecture.
    """
    where = weights.path or f"{weights.hub}@{weights.revision}"
    if not headers.part_of(weights):
        check_kind(weights, "unet", where)

    def converted(state: State) -> State:
        original = {name: state[name] for name in state if name.startswith("model.diffusion_model")}
        if original:
            state = convert_ldm_unet_checkpoint(original, network_config(weights))
        # Copied: they are trained, and the file is mapped.
        return {name: value.to(torch.float32, copy=True) for name, value in state.items()}

    def undescribed(_: State) -> dict[str, Any]:
        what = "a single file needs the configuration that describes it"
        hint = "set the UNet's `config` to a folder with its config.json"
        raise ModelError(what, where=where, hint=hint)

    unet = load_network(
        weights,
        UNet2DConditionModel,
        "a UNet",
        models=("UNet2DConditionModel",),
        hint="name the folder of a diffusers UNet, or copy it again",
        converted=converted,
        inferred=undescribed,
        original=False,
    )
    check_conditions(unet.config, architecture, 2 if architecture == XL else 1, where)
    return unet.float().eval()


class Denoiser(torch.nn.Module):
    """A UNet, and before it the projection of its text where the model has one.

    Attributes:
        text_projection: from the embeddings' width to the UNet's; None where they are equal.
    """

    def __init__(self, unet: UNet, text_projection: torch.nn.Linear | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.text_projection = text_projection

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        **named: Any,
    ) -> Any:
        """Call the UNet: noisy latents, timesteps and text in, (prediction,) out."""
        if self.text_projection is not None:
            encoder_hidden_states = self.text_projection(encoder_hidden_states)
        return self.unet(sample, timestep, encoder_hidden_states, **named)


def check_latents(unet: UNet, channels: int, where: str) -> None:
    """Refuse a UNet that takes latents of another number of channels."""
    if unet.config.in_channels != channels or unet.config.out_channels != channels:
        sides = f"{unet.config.in_channels} channels and gives {unet.config.out_channels}"
        raise ModelError(
            f"the UNet takes {sides}, but the latents have {channels}", where=where, hint=_TOGETHER
        )


def make_projection(
    unet: UNet, text_projection: str | None, text_width: int, where: str
) -> torch.nn.Linear | None:
    """Return the projection from the captions' width to the UNet's, where the model has one.

    A new one is drawn from torch's global generator.

    Args:
        unet: its width decides.
        text_projection: None, `new`, or the path of one.
        text_width: of the captions' embeddings.
        where: path of the UNet, for messages.
    """
    width = unet.config.cross_attention_dim
    widths = {width} if isinstance(width, int) else set(width)
    if text_projection is None:
        if widths != {text_width}:
            raise ModelError(
                f"the UNet takes embeddings {width} wide, but the captions' are {text_width} wide",
                where=where,
                hint=f"{_TOGETHER}; or set the model's `text_projection` to `new`",
            )
        return None
    if len(widths) != 1:
        raise ModelError("the UNet takes embeddings of several widths", where=where, hint=_TOGETHER)
    (inner,) = widths
    if text_projection == NEW:
        return torch.nn.Linear(text_width, inner)
    layer = load_projection(text_projection)
    if (layer.in_features, layer.out_features) != (text_width, inner):
        raise ModelError(
            f"projects from {layer.in_features} to {layer.out_features}, but the captions are "
            f"{text_width} wide and the UNet takes {inner}",
            where=text_projection,
            hint="name another projection, or set `text_projection: new`",
        )
    return layer


def parts_of(unet: UNet, parts: Iterable[str]) -> set[str]:
    """Return the names of all parameters of named parts, such as `cross_attention`."""
    names = [name for name, _ in unet.named_parameters()]
    return set[str]().union(*(parameters_of(part, names) for part in parts))


def adapt(denoiser: Denoiser, trainer: SdTrainer, frozen: torch.dtype) -> None:
    """Set up the trained parameters: a new LoRA over frozen weights, named parts, or all weights.

    A projection is always trained. New weights are drawn from torch's global generator; a new LoRA
    changes nothing yet.

    Args:
        denoiser: float32; changed in place.
        trainer: the settings.
        frozen: number format of the frozen weights under a LoRA.

    Raises:
        TrainingError: a name in `target_modules`, `parts` or `reinitialize` fits nothing.
    """
    unet = denoiser.unet
    check_names(trainer, [name for name, _ in unet.named_parameters()], "trainer")
    if trainer.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    new = parts_of(unet, trainer.reinitialize)
    for path, module in unet.named_modules():
        if any(f"{path}.{name}" in new for name, _ in module.named_parameters(recurse=False)):
            module.reset_parameters()
    if trainer.adapter == "lora":
        unet.to(dtype=frozen)
        try:
            add_adapter(
                unet,
                rank=trainer.rank,
                alpha=trainer.alpha,
                target_modules=trainer.target_modules,
                autocast=frozen != torch.float32,
                dropout=trainer.lora_dropout,
            )
        except ValueError as error:
            raise TrainingError(
                f"a LoRA cannot be put there ({first_line(error)})",
                where="trainer.target_modules",
                hint="name linear or convolution layers",
            ) from None
        return
    chosen = parts_of(unet, ["unet"] if trainer.adapter == "full" else trainer.parts) | new
    for name, parameter in unet.named_parameters():
        parameter.requires_grad_(name in chosen)


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
