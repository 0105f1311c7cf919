"""Files of a UNet, the order of a training by `sd`, and the metadata of its LoRA; no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from latentmake.base import digest
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.models import Model
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.formats.safetensors import read_head
from latentmake.models.cache_recipe import (
    FileDigest,
    files_digest,
    make,
    projection_digest,
    weights_digest,
)
from latentmake.models.files import network_config, weights_files
from latentmake.models.parameterization import (
    SCHEDULE_FILE,
    Given,
    Parameterization,
    parameterization,
    schedule_of,
)
from latentmake.trainers.loop.order import TrainingOrder, lora_layers

if TYPE_CHECKING:
    from latentmake.trainers.init_lora import Place

PREFIX = "unet"
"""The UNet's name in diffusers' pipelines."""
XL = "sdxl"
"""Architecture of Stable Diffusion XL models."""
NEW = "new"
"""Value instead of a projection's path: the projection starts with random weights."""
# Part of a UNet -> pattern of its parameters' names in diffusers. attn1 attends to the picture
# itself, attn2 to the text.
_PARTS = {
    "unet": r"",
    "norms": r"norm",
    "attention": r"(^|\.)attn[12]\.",
    "cross_attention": r"(^|\.)attn2\.",
    "cross_attention_qk": r"(^|\.)attn2\.to_[qk]\.",
    "cross_attention_out": r"(^|\.)attn2\.to_out\.",
}


def parameter_names(unet: Weights) -> list[str] | None:
    """Return the names of a UNet's parameters, from the headers of its files.

    Returns:
        None if the headers do not contain diffusers' names: for a UNet on the hub, in torch's
        format, or with original names.
    """
    names: list[str] = []
    with suppress(ModelError, OSError, ValueError):  # the loader will report the error
        files = weights_files(unet) if unet.path is not None else []
        files = [file for file in files if file.suffix != ".json"]
        names = [name for file in files for name in read_head(file).entries]
    return names if any(name.startswith("down_blocks.") for name in names) else None


def is_xl(config: Mapping[str, Any]) -> bool:
    """Whether a UNet's configuration is SDXL's, with a pooled vector and sizes as conditions."""
    return config.get("addition_embed_type") == "text_time"


def check_conditions(
    config: Mapping[str, Any], architecture: str | None, encoders: int, where: str
) -> None:
    """Refuse a UNet whose conditions differ from the caches of its model.

    Args:
        config: configuration of the UNet.
        architecture: architecture of the model.
        encoders: number of the model's text encoders.
        where: key or path of the UNet, for the error.

    Raises:
        ModelError: the conditions differ.
    """
    if is_xl(config) and architecture != XL:
        what = "this UNet is one of SDXL, and the caches of this model are not"
        hint = f"set the model's `architecture: {XL}`, and name both text encoders as its `text`"
    elif is_xl(config):
        return
    elif architecture == XL or encoders > 1:
        what = f"this UNet is none of SDXL, and the model has {encoders} text encoders"
        hint = "name the UNet of SDXL, or leave out `architecture` and all text encoders but one"
    elif config.get("addition_embed_type") or config.get("class_embed_type"):
        what = "this UNet needs more conditions than text"
        hint = "the sd trainer trains the UNets of Stable Diffusion 1.x, 2.x and XL"
    else:
        return
    raise ModelError(what, where=where, hint=hint)


def parameters_of(parts: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the names that belong to the parameters of some parts of a UNet."""
    patterns = [re.compile(_PARTS.get(part, rf"^{re.escape(part)}\.")) for part in parts]
    return {name for name in names if any(pattern.search(name) for pattern in patterns)}


def places_of(config: Mapping[str, Any] | None) -> Sequence[Place]:
    """Return functions from a layer's name in diffusers to the prefix of its matrices in files.

    They are for files of diffusers, of kohya's scripts, and of the oldest versions of diffusers.
    `config` is the UNet's configuration, if it is known.
    """

    def kohya_place(layer: str) -> str:
        if config is not None and is_xl(config):
            from latentmake.models.tensors import original_unet_layer

            layer = original_unet_layer(layer, config)
        return f"lora_unet_{layer.replace('.', '_')}"

    return lambda layer: f"{PREFIX}.{layer}", kohya_place, str


def shapes_of(unet: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a UNet's parameters by their names in diffusers; {} if unknown."""
    from latentmake.models import tensors

    with suppress(ModelError, LookupError, TypeError, ValueError):  # the loader reports it
        return tensors.unet(network_config(unet) or {}) or {}
    return {}


def check_names(trainer: SdTrainer, parameters: Collection[str], where: str) -> None:
    """Refuse settings that name layers or parts that the UNet does not have.

    As in peft, `target_modules` contains names of layers, or the last parts of such names.

    Args:
        trainer: settings of the training.
        parameters: names of the UNet's parameters.
        where: key of the trainer in the configuration.

    Raises:
        TrainingError: a name fits no layer or part.
    """
    if trainer.adapter == "lora":
        for target in trainer.target_modules:
            if not lora_layers([target], parameters):
                what = f"no layer of the UNet is named `{target}`"
                hint = "the usual ones are to_q, to_k, to_v, to_out.0"
                raise TrainingError(what, where=f"{where}.target_modules", hint=hint)
    for key in ("parts", "reinitialize"):
        for part in getattr(trainer, key):
            if not parameters_of([part], parameters):
                hint = "see how many blocks its config.json has; the first is 0"
                raise TrainingError(f"this UNet has no `{part}`", where=f"{where}.{key}", hint=hint)


def start_of(
    model: Model, trainer: SdTrainer, where: str, file_digest: FileDigest
) -> tuple[str, Parameterization | None]:
    """Return the digest of a training's start, and the network's prediction and noise schedule.

    The digest is that of the network, its noise schedule and a projection of the text.

    Args:
        model: model with the network.
        trainer: settings of the training.
        where: the trainer's key in the configuration.
        file_digest: digest of a file; the planner passes its memo's.

    Raises:
        ModelError: files are missing or cannot be read, or see `parameterization`.
    """
    unet, projection = model.unet, model.text_projection
    assert unet is not None
    scheduler = schedule_of(unet, model.scheduler)
    parts = [weights_digest(unet, file_digest)]
    schedule = Path(scheduler) / SCHEDULE_FILE
    if not scheduler:
        parts.append(digest.of_value(["hub", unet.hub, unet.revision, "scheduler"]))
    elif schedule.is_file():
        parts.append(files_digest([schedule], file_digest))
    else:
        hint = "name the folder of a diffusers scheduler as the model's `scheduler`"
        raise ModelError("this noise schedule does not exist", where=schedule, hint=hint)
    if projection is not None:
        new = projection == NEW
        parts.append(NEW if new else projection_digest(projection, file_digest))
    return digest.of_value(parts), parameterization_of(model, trainer, where)


LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' own name
UNET_FOLDER = "unet"
UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' own name
PROJECTION_FOLDER = "text_projection"
KOHYA_WEIGHTS = "kohya.safetensors"
"""Second file of the LoRA, for A1111, Forge, ComfyUI and sd-scripts."""


def parameterization_of(
    model: Model,
    trainer: SdTrainer,
    where: str = "trainer",
    config: Mapping[str, Any] | None = None,
) -> Parameterization | None:
    """Return the prediction and the noise schedule of a model's UNet.

    `where` is the trainer's key in the configuration. See `models.parameterization`.
    """
    assert model.unet is not None
    given = Given(trainer.prediction_type, trainer.zero_terminal_snr, where)
    scheduler = schedule_of(model.unet, model.scheduler)
    return parameterization(model.unet, scheduler, model.spec, given, config)


class SdOrder(TrainingOrder):
    """Order of the trainer `sd`."""

    kind: Literal["sd"] = "sd"
    trainer: SdTrainer

    @property
    def unet(self) -> Weights:
        """Weights of the network that is trained."""
        assert self.model.unet is not None
        return self.model.unet

    @property
    def scheduler(self) -> str:
        """Folder of the noise schedule; "" for the schedule in the network's hub repository."""
        return schedule_of(self.unet, self.model.scheduler)

    @property
    def results(self) -> list[str]:
        """Path of the LoRA, or of the UNet's weights, relative to `output`."""
        return [LORA_WEIGHTS if self.trains_lora else f"{UNET_FOLDER}/{UNET_WEIGHTS}"]

    def described(self) -> dict[str, JsonValue]:
        """Return the paths or hub ids of UNet, VAE and noise schedule."""
        return {
            "unet": self.unet.path or self.unet.hub,
            "vae": self.model.vae.path or self.model.vae.hub,
            "scheduler": self.scheduler,
        }

    def objective(self) -> dict[str, JsonValue]:
        """Return the settings that shape the UNet's loss before its training, by name."""
        trainer = self.trainer
        settings: dict[str, JsonValue] = {
            "prediction_type": trainer.prediction_type,
            "reinitialize": [*trainer.reinitialize],
            "seed": trainer.seed,
        }
        if trainer.zero_terminal_snr is not None:
            settings["zero_terminal_snr"] = trainer.zero_terminal_snr
        return settings


def made_of(order: SdOrder, file_digest: FileDigest) -> str:
    """Return the digest of all networks that sample pictures; raises ModelError."""
    model = order.model
    vae, text = weights_digest(model.vae, file_digest), make("text", None, model, file_digest)
    return digest.of_value([order.weights, order.objective(), vae, text])


_V2_WIDTH = 1024  # width of text embeddings in Stable Diffusion 2.x


def describe(order: SdOrder, config: Mapping[str, Any], prediction: str | None) -> dict[str, str]:
    """Return the metadata of a LoRA that other programs show, with sd-scripts' keys.

    Args:
        order: order of the training.
        config: configuration of the UNet.
        prediction: prediction of the UNet.
    """
    unet = order.unet
    second = config.get("cross_attention_dim") == _V2_WIDTH
    version = f"sd_v{2 if second else 1}{'_v' if prediction == 'v_prediction' else ''}"
    place = Path(unet.path or unet.hub or "")
    name = place.parent.name if unet.path and place.name == PREFIX else place.name
    return {
        "ss_output_name": order.run,
        "ss_network_module": "networks.lora",
        "ss_sd_model_name": name if unet.path else unet.hub or "",
        "ss_base_model_version": "sdxl_base_v1-0" if is_xl(config) else version,
        "ss_v2": str(second),
    }
