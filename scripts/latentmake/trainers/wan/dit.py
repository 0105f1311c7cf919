"""Files of Wan's DiT, and the order of a training by `wan`; no torch.

A DiT is a folder of diffusers (of the network or its pipeline), a folder of the original release,
or one .safetensors file with the names of either. Only headers are read. They suffice to refuse a
DiT with missing tensors or wrong shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from latentmake.base import digest
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.config.weights import Weights
from latentmake.formats.safetensors import Tensor, read_head
from latentmake.models.cache_recipe import FileDigest, files_digest, make, weights_digest
from latentmake.models.files import config_file, network_config, refuse_missing, weights_files
from latentmake.models.headers import kinds_of, one
from latentmake.models.inspection import DIT, ModelFile, other_task
from latentmake.models.tensors import misfit, wan_dit
from latentmake.trainers.loop.order import ClipSettings, TrainingOrder, lora_layers

HINT = (
    "name the folder of a WanTransformer3DModel or of its pipeline, or a .safetensors file in "
    "diffusers' or the original names"
)
"""Hint that lists the accepted forms of `dit`."""
IGNORED = ".norm_added_q."
"""Part of the names of tensors that image-to-video networks contain but no program uses.

diffusers ignores them, too."""
IN_BLOCK = re.compile(r"^blocks\.(\d+)\.")
"""Pattern of the prefix of a block's tensor names."""
LAST = "proj_out"
"""Layer after the blocks: the only layer outside the blocks that can have a LoRA."""

_CLASSES = ("WanTransformer3DModel", "WanModel")  # diffusers' and the original release's
_NUMBERS = ("BF16", "F16", "F32")
_HEAD = 128  # width of an attention head in all Wan models
_USUAL = "the usual ones are to_q, to_k, to_v, to_out.0, ffn.net.0.proj, ffn.net.2"
# Key in the original release's config.json -> key in diffusers' configuration.
_KEYS = {"in_dim": "in_channels", "out_dim": "out_channels", "num_heads": "num_attention_heads"}


def read_dit(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the headers of a Wan DiT.

    Returns:
        Tensors by their names in diffusers, and diffusers' configuration; if the DiT has none, it
        is derived from the shapes.

    Raises:
        ModelError: the path is missing, damaged, no complete Wan DiT, or has other number formats.
    """
    weights = Weights(path=path)
    files = _files(weights)
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= {to_diffusers(name): tensor for name, tensor in _tensors(file).items()}
    config = network_config(weights) or {} if files[0].name == "config.json" else {}
    named = config.get("_class_name", _CLASSES[0])
    try:
        if named not in _CLASSES:
            raise ValueError(f"is of class {named}, not {_CLASSES[0]}")
        if (kinds := kinds_of(tensors)).get("DiT") != DIT:
            kind = one(next(iter(kinds.values()))) if kinds else "another network"
            raise ValueError(f"is {kind}, not a {DIT}")
        tensors = {name: tensor for name, tensor in tensors.items() if IGNORED not in name}
        for name, tensor in tensors.items():
            if tensor.dtype not in _NUMBERS:
                bits = "fp8" if tensor.dtype.startswith("F8") else tensor.dtype
                needs = "the trainer wan needs weights in bf16, fp16 or float32"
                raise ValueError(f"holds {name} in {bits}; {needs}")
        sizes = _config(shapes_of(tensors), config)
        if fault := misfit(dict(wan_dit(sizes)), tensors, strict=True):
            raise ValueError(fault)
    except ValueError as error:
        raise ModelError(str(error), where=path, hint=HINT) from None
    own = config if named == _CLASSES[0] else {k: v for k, v in config.items() if k == "eps"}
    return tensors, {**own, **sizes}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def _files(weights: Weights) -> list[Path]:
    """Return the files of a DiT: its configuration, if there is one, and its weights.

    A config.json beside a single file counts only if it describes a Wan DiT.

    Raises:
        ModelError: files are missing or of another format.
    """
    place = Path(weights.path or "")
    refuse_missing(place)
    if place.is_file() and place.suffix != ".safetensors":
        raise ModelError("is not a .safetensors file", where=place, hint=HINT)
    files = weights_files(weights)
    if place.is_file() and config_file(weights) is not None:
        try:
            config = network_config(weights) or {}
        except ModelError:  # damaged, but it may belong to another file
            config = {}
        return files if config.get("_class_name") in _CLASSES else files[1:]
    if any(file.suffix not in (".json", ".safetensors") for file in files):
        raise ModelError("holds no .safetensors file", where=place, hint=HINT)
    return files


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return read_head(file).tensors
    except ValueError as error:
        raise ModelError(str(error), where=file, hint="copy it again") from None
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise ModelError(what, where=file, hint="check the file's permissions") from None


def _config(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the sizes of a DiT from its shapes, with the keys of diffusers' configuration.

    The number of heads comes from `config` (diffusers' or the original release's), or else from the
    width of a head in Wan's own models.

    Raises:
        ValueError: a tensor is missing or has an impossible shape, the configuration contradicts
            the shapes, or the number of heads is unknown.
    """

    def of(name: str, dimensions: int = 2) -> Sequence[int]:
        if name not in shapes:
            raise ValueError(f"lacks {name}")
        if len(shapes[name]) != dimensions or 0 in shapes[name]:
            raise ValueError(f"has {name} of shape {list(shapes[name])}")
        return shapes[name]

    embedder, image = "condition_embedder.{}.linear_1.weight", "condition_embedder.image_embedder"
    dim, channels, *patch = of("patch_embedding.weight", 5)
    said = {_KEYS.get(key, key): value for key, value in config.items()}
    heads = said.get("num_attention_heads")
    if heads is None and dim % _HEAD:
        what = "no config.json beside it tells their number of heads"
        raise ValueError(f"has blocks {dim} wide, and {what}")
    heads = dim // _HEAD if heads is None else heads
    if not isinstance(heads, int) or heads < 1 or dim % heads:
        raise ValueError(f"has blocks {dim} wide, and its config.json says {heads} heads")
    width = of(f"{image}.norm1.weight", 1)[0] if f"{image}.norm1.weight" in shapes else None
    places = of(f"{image}.pos_embed", 3)[1] if f"{image}.pos_embed" in shapes else None
    sizes = {
        "patch_size": patch,
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "in_channels": channels,
        "out_channels": of("proj_out.weight")[0] // math.prod(patch),
        "text_dim": of(embedder.format("text_embedder"))[1],
        "freq_dim": of(embedder.format("time_embedder"))[1],
        "ffn_dim": of("blocks.0.ffn.net.0.proj.weight")[0],
        "num_layers": 1 + max(int(match[1]) for match in map(IN_BLOCK.match, shapes) if match),
        "image_dim": width,
        "added_kv_proj_dim": None if width is None else dim,
        "pos_embed_seq_len": places,
    }
    for key, value in sizes.items():
        if key in said and said[key] != value:
            raise ValueError(f"has {key} {value}, and its config.json says {said[key]}")
    return sizes


# -- the networks of a model ----------------------------------------------------------------------


def trained_networks(model: Model) -> Iterator[ModelFile]:
    """Inspect the networks of a model that the trainer `wan` trains, and yield the results."""
    paths = paths_of(model)
    if not paths:
        yield ModelFile("dit", "", fault="is not set: there is no network to train")
    for key, path in paths.items():
        try:
            tensors, config = read_dit(path)
        except ModelError as error:
            yield ModelFile(key, error.where or path, fault=error.what)
            continue
        fault = other_task(model, tensors)
        takes = config["image_dim"] is not None
        if not fault and takes != model.needs_clip:
            words = ("takes", "needs none") if takes else ("does not take", "needs it")
            output = f"a CLIP image encoder's output; {model.task} {words[1]}"
            fault = f"is a {DIT} that {words[0]} {output}"
        yield ModelFile(key, path, tensors, fault, description=DIT)


def check_networks(
    model: Model, model_name: str, targets: Iterable[str], where: str
) -> list[list[str]]:
    """Check a model's networks; return the names of the layers that get a LoRA, for each network.

    Args:
        model: model with the paths of its networks.
        model_name: name of the model in the configuration.
        targets: names of layers, see `check_targets`.
        where: key of the targets in the configuration.

    Raises:
        ModelError: a network is missing, damaged, of another kind or for another task.
        TrainingError: a target fits no layer that can have a LoRA.
    """
    layers = []
    for file in trained_networks(model):
        if file.fault:
            fault = f"{file.place}: {file.fault}" if file.place else file.fault
            raise ModelError(fault, where=f"models.{model_name}.{file.key}", hint=HINT)
        layers.append(check_targets(targets, shapes_of(file.tensors), where))
    return layers


def check_targets(
    targets: Iterable[str], shapes: Mapping[str, Sequence[int]], where: str
) -> list[str]:
    """Return the names of the layers that get a LoRA.

    As in peft, a target is the name of a layer, or the last parts of the name. Linear layers in
    blocks can have a LoRA, and so can `proj_out`. For the latter, musubi-tuner merges a LoRA into
    the weights to generate clips, but its `networks/lora_wan.py` does not train it.

    Args:
        targets: names of layers.
        shapes: shapes of the network's tensors by name.
        where: key of the targets in the configuration.

    Raises:
        TrainingError: a target fits no layer, or a layer that cannot have a LoRA.
    """
    chosen: set[str] = set()
    for target in targets:
        fit = lora_layers([target], shapes)
        if not fit:
            what = f"no layer of the DiT is named `{target}`"
            raise TrainingError(what, where=where, hint=_USUAL)
        for layer in fit:
            if len(shapes[f"{layer}.weight"]) != 2 or not (IN_BLOCK.match(layer) or layer == LAST):
                what = f"`{target}` fits {layer}, which is no linear layer of a block"
                raise TrainingError(what, where=where, hint=_USUAL)
        chosen |= set(fit)
    return sorted(chosen)


def dit_digest(model: Model, file_digest: FileDigest = digest.of_file) -> str:
    """Return the digest of the networks of a model that are trained; raises ModelError."""
    files = {key: _files(Weights(path=path)) for key, path in paths_of(model).items()}
    digests = [[key, files_digest(paths, file_digest)] for key, paths in files.items()]
    return digest.of_value(digests)


def paths_of(model: Model) -> dict[str, str]:
    """Return the paths of a model's networks by key; in Wan 2.2, `dit` is for low noise."""
    paths = {key: getattr(model, key) for key in ("dit", "dit_high_noise")}
    return {key: path for key, path in paths.items() if path is not None}


# -- names ----------------------------------------------------------------------------------------

# The tables follow diffusers' `convert_wan_transformer_to_diffusers`. Files of ComfyUI, and of
# trainers that wrap the network, have a prefix before the original names.
_PREFIX = re.compile(r"^(model\.)?(diffusion_model\.)?(module\.)?")
_NAME = re.compile(r"(blocks\.\d+\.)?(.+?)(\.weight|\.bias)?")
_IN_BLOCK = {
    **{
        f"{attention}.{original}": f"{new}.{layer}"
        for attention, new in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for original, layer in (
            *(("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")),
            *(("norm_q", "norm_q"), ("norm_k", "norm_k")),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",  # norm2 of the original has no weights
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_OUTSIDE = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_LAYERS = {new: original for original, new in (_IN_BLOCK | {"head.head": LAST}).items()}


def to_diffusers(name: str) -> str:
    """Convert a tensor's name in a file to its name in diffusers.

    An example is `model.diffusion_model.blocks.0.self_attn.q.weight`. Names that are unknown, or in
    diffusers' form already, only lose their prefix.
    """
    bare = _PREFIX.sub("", name)
    if (match := _NAME.fullmatch(bare)) is None:
        return bare
    block, layer, ending = (group or "" for group in match.groups())
    return f"{block}{(_IN_BLOCK if block else _OUTSIDE).get(layer, layer)}{ending}"


def original_layer(layer: str) -> str:
    """Convert a layer's name, such as `blocks.0.attn1.to_q`, to its name in the original release.

    The layer must be one that can have a LoRA.
    """
    block = match[0] if (match := IN_BLOCK.match(layer)) else ""
    return f"{block}{_LAYERS[layer.removeprefix(block)]}"


PREFIX = "transformer"
"""Name of the network in LoRA files of diffusers, for both networks of Wan 2.2."""
PLACES = (
    lambda layer: f"{PREFIX}.{layer}",
    lambda layer: f"lora_unet_{original_layer(layer).replace('.', '_')}",
    lambda layer: f"diffusion_model.{original_layer(layer)}",
)
"""Functions from a layer's name in diffusers to its name in LoRA files: those of diffusers, of
musubi-tuner and of ComfyUI."""


def lora_names(*, high_noise: bool = False) -> list[str]:
    """Return the names of a network's LoRA files: for diffusers, musubi-tuner and ComfyUI.

    With `high_noise`, the names have a prefix, for the second network of Wan 2.2.
    """
    prefix = "high_noise_" if high_noise else ""
    names = ("pytorch_lora_weights", "musubi", "comfyui")
    return [f"{prefix}{name}.safetensors" for name in names]


class WanOrder(TrainingOrder):
    """Order of the trainer `wan`.

    Attributes:
        flow_shift: shift of the timesteps.
        boundary: fraction of the timesteps from which the network for high noise is used; None
            for models with one network.
    """

    kind: Literal["wan"] = "wan"
    flow_shift: float
    boundary: float | None = None
    trainer: WanTrainer

    @property
    def results(self) -> list[str]:
        """Paths of the networks' LoRA files in diffusers' format, relative to `output`."""
        return [lora_names(high_noise=key != "dit")[0] for key in paths_of(self.model)]

    def described(self) -> dict[str, JsonValue]:
        """Return the paths or hub ids of the networks and the VAE."""
        return {
            "dit": self.model.dit,
            "dit_high_noise": self.model.dit_high_noise,
            "vae": self.model.vae.path or self.model.vae.hub,
        }

    def objective(self) -> dict[str, JsonValue]:
        """Return the shift, the boundary and the distribution of the timesteps."""
        return {
            "flow_shift": self.flow_shift,
            "timestep_boundary": self.boundary,
            "timestep_sampling": self.trainer.timestep_sampling,
        }

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the weights.

        It includes the shift and the boundary in use, since their defaults depend on the run's
        resolutions and the model's task.
        """
        plain = self.trainer.model_copy(update={"flow_shift": None, "timestep_boundary": None})
        rest = TrainingOrder.settings_digest(self.model_copy(update={"trainer": plain}))
        return digest.of_value([rest, self.flow_shift, self.boundary])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the weights, by name."""
        used = {"flow_shift": self.flow_shift, "timestep_boundary": self.boundary}
        return super().settings() | used

    def sample_settings(self) -> ClipSettings:
        """Return the settings of the sample clips."""
        samples = self.trainer.samples
        film = {"frames": samples.frames, "fps": samples.fps, "flow_shift": self.flow_shift}
        return super().sample_settings().model_copy(update=film)


def boundary_of(trainer: WanTrainer, model: Model) -> float | None:
    """Return the fraction of the timesteps from which Wan 2.2's network for high noise is used.

    It is None for models with one network.
    """
    boundary = model.version.boundary
    if boundary is not None and trainer.timestep_boundary is not None:
        boundary = trainer.timestep_boundary
    return None if boundary is None else boundary / 1000


def made_of(model: Model, name: str, file_digest: FileDigest) -> str:
    """Return the digest of all networks and encoders of a model.

    Raises:
        ModelError: a file is missing or cannot be read; the error names the model by its `name`.
    """
    try:
        encoders = [
            weights_digest(encoder, file_digest, original=True)
            for encoder in (model.vae, model.clip)
            if encoder is not None
        ]
        text = make("text", None, model, file_digest)
        return digest.of_value([dit_digest(model, file_digest), *encoders, text])
    except ModelError as error:
        what = f"{error.where}: {error.what}"
        raise ModelError(what, where=f"models.{name}", hint=error.hint) from None
