"""Load the UNet of a training, check it against the caches, set up its trained weights, save them.

Both files of a LoRA contain the same float32 numbers. The LoRA adds alpha / rank * up @ down to the
weight of a layer.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `unet.mid_block.attentions.0.proj_in.lora_A.weight` | metadata | peft |
| kohya | `lora_unet_mid_block_attentions_0_proj_in.lora_down.weight` | `.alpha` | sd-scripts |

sd-scripts' `networks/lora.py` builds a name from the path of the layer in diffusers' UNet, or for
SDXL in the UNet of the original release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.base import atomic
from latentmake.base.errors import ModelError, TrainingError, first_line
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.encode.encoders.local_state import (
    State,
    load_network,
    load_projection,
    write_projection,
)
from latentmake.formats import cachefile
from latentmake.models.files import checkpoint_of, network_config
from latentmake.models.inspection import check_kind
from latentmake.trainers.loop.recipe import seed_of
from latentmake.trainers.lora import (
    ADAPTER,
    begin_lora,
    kohya_bytes,
    load_lora,
    lora_bytes,
    new_adapter,
    unreadable,
)
from latentmake.trainers.sd.unet import (
    KOHYA_WEIGHTS,
    LORA_WEIGHTS,
    NEW,
    PREFIX,
    PROJECTION_FOLDER,
    UNET_FOLDER,
    UNET_WEIGHTS,
    XL,
    SdOrder,
    check_conditions,
    check_names,
    describe,
    parameters_of,
    places_of,
)
from latentmake.trainers.weights_metadata import base_of, of_architecture

UNet: TypeAlias = Any  # a UNet2DConditionModel: diffusers and peft have no types
_TOGETHER = "`unet`, `vae` and `text` of the model must come from the same base model"


def load_unet(weights: Weights, architecture: str | None = None) -> UNet:
    """Load a UNet in float32 on the CPU, from a diffusers folder, a single file or the hub.

    Raises:
        ModelError: the UNet is missing or incomplete, or of another architecture than the model.
    """
    where = weights.path or f"{weights.hub}@{weights.revision}"
    if checkpoint_of(weights) is None:
        check_kind(weights, "unet", where)

    def converted(state: State) -> State:
        original = {name: state[name] for name in state if name.startswith("model.diffusion_model")}
        if original:
            state = convert_ldm_unet_checkpoint(original, network_config(weights))
        # Copy the weights: they are trained, and must not stay mapped to the file.
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
    """A UNet, preceded by a projection of the text if the model has one.

    Attributes:
        text_projection: layer from the width of the embeddings to the UNet's; None if they are
            equal.
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
        """Call the UNet with noisy latents, timesteps and text; return (prediction,)."""
        if self.text_projection is not None:
            encoder_hidden_states = self.text_projection(encoder_hidden_states)
        return self.unet(sample, timestep, encoder_hidden_states, **named)


def load_denoiser(order: SdOrder, channels: int, text_width: int) -> Denoiser:
    """Load the UNet and the projection of an order; seed torch's generator for new weights.

    Raises:
        ModelError: a file is missing or damaged, or the network does not fit the caches.
    """
    where, projection = order.unet.path or order.unet.hub or "", order.model.text_projection
    unet = load_unet(order.unet, order.model.architecture)
    takes, gives = unet.config.in_channels, unet.config.out_channels
    if takes != channels or gives != channels:
        sides = f"{takes} channels and gives {gives}, but the latents have {channels}"
        raise ModelError(f"the UNet takes {sides}", where=where, hint=_TOGETHER)
    torch.manual_seed(seed_of(order.trainer.seed, "network"))
    width = unet.config.cross_attention_dim
    widths = {width} if isinstance(width, int) else set(width)
    if projection is None and widths != {text_width}:
        what = f"the UNet takes embeddings {width} wide, but the captions' are {text_width} wide"
        hint = f"{_TOGETHER}; or set the model's `text_projection` to `new`"
        raise ModelError(what, where=where, hint=hint)
    if projection is None:
        return Denoiser(unet)
    if len(widths) != 1:
        raise ModelError("the UNet takes embeddings of several widths", where=where, hint=_TOGETHER)
    (inner,) = widths
    if projection == NEW:
        return Denoiser(unet, torch.nn.Linear(text_width, inner))
    layer = load_projection(projection)
    if (layer.in_features, layer.out_features) != (text_width, inner):
        raise ModelError(
            f"projects from {layer.in_features} to {layer.out_features}, but the captions are "
            f"{text_width} wide and the UNet takes {inner}",
            where=projection,
            hint="name another projection, or set `text_projection: new`",
        )
    return Denoiser(unet, layer)


def adapt(
    denoiser: Denoiser, trainer: SdTrainer, frozen: torch.dtype, begun: Iterable[Path] = ()
) -> None:
    """Set up the trained parameters: a new LoRA over frozen weights, some parts, or all weights.

    A projection is always trained. New weights are drawn from torch's global generator. A new LoRA
    does not change the output of the UNet yet.

    Args:
        denoiser: network in float32, which is changed in place.
        trainer: settings of the training.
        frozen: dtype of the frozen weights under a LoRA.
        begun: LoRA files whose weights the new LoRA starts from.

    Raises:
        TrainingError: a name in `target_modules`, `parts` or `reinitialize` fits no layer.
    """
    unet = denoiser.unet
    names = [name for name, _ in unet.named_parameters()]
    check_names(trainer, names, "trainer")
    if trainer.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    new = parameters_of(trainer.reinitialize, names)
    for path, module in unet.named_modules():
        if any(f"{path}.{name}" in new for name, _ in module.named_parameters(recurse=False)):
            module.reset_parameters()
    if trainer.adapter == "lora":
        unet.to(dtype=frozen)
        try:
            new_adapter(unet, trainer, frozen)
        except ValueError as error:
            what = f"a LoRA cannot be put there ({first_line(error)})"
            hint = "name linear or convolution layers"
            raise TrainingError(what, where="trainer.target_modules", hint=hint) from None
        for file in begun:
            begin_lora(unet, file, places_of(unet.config))
        return
    trained = ["unet"] if trainer.adapter == "full" else trainer.parts
    chosen = parameters_of(trained, names) | new
    for name, parameter in unet.named_parameters():
        parameter.requires_grad_(name in chosen)


def write_copy(
    denoiser: Denoiser,
    folder: Path,
    order: SdOrder,
    prediction: str | None,
    metadata: Mapping[str, str],
) -> None:
    """Write a UNet or its LoRA, and the projection if there is one; replace the folder.

    A LoRA has two files; the same LoRA gives the same bytes.

    Args:
        denoiser: network that is written.
        folder: folder that is replaced.
        order: order of the training.
        prediction: prediction of the UNet, for the metadata.
        metadata: further metadata of the training.
    """
    unet = denoiser.unet
    loads = describe(order, unet.config, prediction)
    if metadata:
        version, lora = loads["ss_base_model_version"], order.trains_lora
        metadata = {
            **metadata,
            **of_architecture(version, lora=lora, prediction=prediction),
            **base_of(order.unet.path),
        }
        loads = {**metadata, **loads}
    with atomic.replacing_folder(folder) as new:
        if order.trains_lora:
            adapter = unet.peft_config[ADAPTER]
            described = {
                **loads,
                "ss_network_dim": str(adapter.r),
                "ss_network_alpha": str(float(adapter.lora_alpha)),
            }
            atomic.write(new / LORA_WEIGHTS, lora_bytes(unet, PREFIX, metadata))
            kohya = kohya_bytes(unet, places_of(unet.config)[1], described)
            atomic.write(new / KOHYA_WEIGHTS, kohya)
        else:
            unet.save_pretrained(new / UNET_FOLDER, safe_serialization=True, max_shard_size="1TB")
            if metadata:
                file = new / UNET_FOLDER / UNET_WEIGHTS
                cachefile.describe_copy(file, file, {"format": "pt", **metadata})
        if denoiser.text_projection is not None:
            write_projection(denoiser.text_projection, new / PROJECTION_FOLDER)


def read_copy(denoiser: Denoiser, file: Path, strength: float = 1.0, *, lora: bool) -> None:
    """Load the weights that `write_copy` wrote.

    Args:
        denoiser: network, changed in place. If its UNet has no LoRA, one with the file's sizes is
            added.
        file: LoRA file, or weight file in the UNet's folder; the projection's folder is beside it.
        strength: factor on the change of the weights by a LoRA.
        lora: whether the file is a LoRA.

    Raises:
        TrainingError: a file is missing or damaged, or does not fit the network.
    """
    folder = file.parent if lora else file.parent.parent
    try:
        if lora:
            load_lora(denoiser.unet, file, PREFIX, strength)
        else:
            denoiser.unet.load_state_dict(load_file(file))
        if denoiser.text_projection is not None:
            file = folder / PROJECTION_FOLDER
            denoiser.text_projection.load_state_dict(load_projection(str(file)).state_dict())
    except (OSError, SafetensorError, RuntimeError) as error:
        raise unreadable(error, file) from None
