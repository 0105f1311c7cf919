"""UNet in training: loaded, checked against the caches, given what is trained, and written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

from latentmake.caches.encoders.local_state import State, load_network
from latentmake.caches.encoders.projection import load_projection
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.errors import ModelError, TrainingError, first_line
from latentmake.models import checkpoints
from latentmake.models.checks import check_kind
from latentmake.models.files import network_config
from latentmake.training.lora import add_adapter
from latentmake.training.sd.unet import NEW, XL, check_conditions, check_names, parameters_of

UNet: TypeAlias = Any  # a UNet2DConditionModel: diffusers and peft have no types
_TOGETHER = "`unet`, `vae` and `text` of the model must come from the same base model"


def load_unet(weights: Weights, architecture: str | None = None) -> UNet:
    """Load a UNet in float32 on the CPU: a diffusers folder, a single file, or from the hub.

    Raises:
        ModelError: it is missing, incomplete, or no UNet of the model's architecture.
    """
    where = weights.path or f"{weights.hub}@{weights.revision}"
    if not checkpoints.part_of(weights):
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
