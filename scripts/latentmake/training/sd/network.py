"""The trained network: loaded, checked against the caches, adapted, and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.caches.encoders.local_state import fill, local_state, without_weights
from latentmake.caches.encoders.projection import load_projection, write_projection
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.errors import ModelError, TrainingError, first_line
from latentmake.files import atomic
from latentmake.models import checkpoints
from latentmake.models.checks import check_kind
from latentmake.models.files import config_file, network_config, weights_files
from latentmake.training.loop.result import LORA_WEIGHTS
from latentmake.training.lora import add_adapter
from latentmake.training.sd.lora_files import read_lora, unreadable, write_lora
from latentmake.training.sd.order import PROJECTION_FOLDER, UNET_FOLDER, UNET_WEIGHTS
from latentmake.training.sd.unet import NEW, check_names, parameters_of

UNet: TypeAlias = Any  # a UNet2DConditionModel: diffusers and peft have no types
_UNet: UNet = UNet2DConditionModel
_ONLY = "the sd trainer trains the UNets of Stable Diffusion 1.x and 2.x"
_TOGETHER = "`unet`, `vae` and `text` of the model must come from the same base model"


def load_unet(weights: Weights) -> UNet:
    """Load a UNet in float32 on the CPU: a diffusers folder, a single file, or from the hub.

    Raises:
        ModelError: it is missing, incomplete, or no UNet of Stable Diffusion 1.x or 2.x.
    """
    where = weights.path or f"{weights.hub}@{weights.revision}"
    try:
        if weights.path is not None and Path(weights.path).is_file():
            unet = _single_file(weights)
            missing = [name for name, each in unet.named_parameters() if each.is_meta]
        else:
            source: dict[str, Any] = {"local_files_only": True}
            if weights.path is None:
                source = {"revision": weights.revision, "subfolder": weights.subfolder}
            else:
                weights_files(weights)
                network_config(weights)  # refuses what would be built for hours
                check_kind(weights, "unet", where)
            unet, info = _UNet.from_pretrained(
                weights.path or weights.hub,
                torch_dtype=torch.float32,
                output_loading_info=True,
                **source,
            )
            missing = list(info["missing_keys"])
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # diffusers has its own for each odd value
        raise ModelError(
            f"the UNet cannot be loaded ({first_line(error)})",
            where=where,
            hint="name the folder of a diffusers UNet, or copy it again",
        ) from None
    if missing:
        raise ModelError(
            f"the UNet's weights are incomplete: {missing[0]} and {len(missing) - 1} others are "
            "missing",
            where=where,
            hint="copy the model again",
        )
    if unet.config.addition_embed_type is not None or unet.config.class_embed_type is not None:
        raise ModelError("this UNet needs more conditions than text", where=where, hint=_ONLY)
    return unet


def _single_file(weights: Weights) -> UNet:
    if checkpoints.part_of(weights):
        return _of_checkpoint(weights)
    config = config_file(weights)
    if config is None:
        raise ModelError(
            "a single file needs the configuration that describes it",
            where=weights.path or "",
            hint="set the UNet's `config` to a folder with its config.json",
        )
    network_config(weights)
    check_kind(weights, "unet", weights.path or "")
    return _UNet.from_single_file(
        weights.path, config=str(config.parent), local_files_only=True, torch_dtype=torch.float32
    )


def _of_checkpoint(weights: Weights) -> UNet:
    config = checkpoints.config_of(weights)
    unet = without_weights(_UNet, config)
    state = local_state(weights)
    own = {name: state[name] for name in state if name.startswith("model.diffusion_model")}
    fill(unet, convert_ldm_unet_checkpoint(own, config))
    return unet.float().eval()


class Denoiser(torch.nn.Module):
    """A UNet, and before it the projection of its text where the model has one.

    Attributes:
        text_projection: from the embeddings' width to the UNet's; None where they are equal.
        lora: whether a LoRA is trained.
    """

    def __init__(self, unet: UNet, text_projection: torch.nn.Linear | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.text_projection = text_projection
        self.lora = False

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
    if trainer.adapter == "full":
        unet.requires_grad_(True)
        return
    unet.requires_grad_(False)
    denoiser.lora = trainer.adapter == "lora"
    if denoiser.lora:
        if frozen != torch.float32:
            unet.to(dtype=frozen)
        _add_lora(unet, trainer, autocast=frozen != torch.float32)
    else:
        chosen = parts_of(unet, trainer.parts) | new
        for name, parameter in unet.named_parameters():
            parameter.requires_grad_(name in chosen)
    for parameter in unet.parameters():
        if parameter.requires_grad:  # the optimizer needs small differences
            parameter.data = parameter.data.float()


def _add_lora(unet: UNet, trainer: SdTrainer, *, autocast: bool) -> None:
    try:
        add_adapter(
            unet,
            rank=trainer.rank,
            alpha=trainer.alpha,
            target_modules=trainer.target_modules,
            autocast=autocast,
        )
    except ValueError as error:
        raise TrainingError(
            f"a LoRA cannot be put there ({first_line(error)})",
            where="trainer.target_modules",
            hint="name linear or convolution layers",
        ) from None


def write_copy(
    denoiser: Denoiser, folder: Path, described: Callable[[], Mapping[str, str]]
) -> None:
    """Write the trained weights into a folder of their own; one of that name is replaced.

    Args:
        denoiser: with its trained weights.
        folder: of the files.
        described: returns the metadata of a LoRA, see `lora_files.describe`.
    """
    with atomic.replacing_folder(folder) as new:
        if denoiser.lora:
            write_lora(denoiser.unet, new, described())
        else:
            unet = new / UNET_FOLDER
            denoiser.unet.save_pretrained(unet, safe_serialization=True, max_shard_size="1TB")
        if denoiser.text_projection is not None:
            write_projection(denoiser.text_projection, new / PROJECTION_FOLDER)


def read_copy(denoiser: Denoiser, folder: Path) -> None:
    """Put back the weights that `write_copy` or `write_trained` wrote into a folder.

    Raises:
        TrainingError: they are missing or damaged, or of another network.
    """
    file = folder / LORA_WEIGHTS if denoiser.lora else folder / UNET_FOLDER / UNET_WEIGHTS
    try:
        if denoiser.lora:
            read_lora(denoiser.unet, file)
        else:
            denoiser.unet.load_state_dict(load_file(file))
        if denoiser.text_projection is not None:
            layer = load_projection(str(folder / PROJECTION_FOLDER))
            denoiser.text_projection.load_state_dict(layer.state_dict())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise unreadable(error, file) from None
