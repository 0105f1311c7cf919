"""Wan's DiT on a disk, as the trainer `wan` reads it: its files, sizes and faults.

It may be a folder of diffusers, a folder of the original release, or one .safetensors file in
either one's names. `models.places` finds it in the folder of a pipeline. Headers alone are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from latentmake import digest
from latentmake.config.weights import Weights
from latentmake.errors import ModelError, TrainingError
from latentmake.files.safetensors import Tensor, read_head
from latentmake.models.files import config_file, network_config, refuse_missing, weights_files
from latentmake.models.recipe import FileDigest, weights_digest
from latentmake.models.wan_files import DIT, ModelFile, other_task
from latentmake.models.wan_names import to_diffusers
from latentmake.models.wan_shapes import IN_BLOCK, DitShapes, shapes_of, tensor_faults
from latentmake.models.weight_kinds import Content, kinds_of

HINT = (
    "name the folder of a WanTransformer3DModel or of its pipeline, or a .safetensors file in "
    "diffusers' or the original names"
)
"""Forms of `dit`, for a message."""

IGNORED = ".norm_added_q."
"""Part of the names of image-to-video's tensors that no code uses; diffusers ignores them too."""

_CLASSES = ("WanTransformer3DModel", "WanModel")  # diffusers' and the original release's
_NUMBERS = ("BF16", "F16", "F32")
_HEAD = 128  # width of an attention head where a configuration of diffusers says nothing
_USUAL = "the usual ones are to_q, to_k, to_v, to_out.0, ffn.net.0.proj, ffn.net.2"


class Dit(NamedTuple):
    """A Wan DiT on a disk.

    Attributes:
        place: its own folder or file.
        files: its configuration if it has one, then its weights.
        tensors: by their names in diffusers.
        shapes: its sizes.
        config: diffusers' configuration: its own, or made of the sizes.
    """

    place: Path
    files: list[Path]
    tensors: dict[str, Tensor]
    shapes: DitShapes
    config: dict[str, Any]


class _Networks(Protocol):
    """Paths of networks: of a model, or of the order of a training."""

    @property
    def dit(self) -> str | None:
        """Path of the network; of Wan 2.2 that for low noise."""

    @property
    def dit_high_noise(self) -> str | None:
        """Path of Wan 2.2's network for high noise."""

    @property
    def task(self) -> str | None:
        """Task of the model, as musubi-tuner names it."""

    @property
    def needs_clip(self) -> bool:
        """Whether the CLIP image encoder's output is an input."""


def read_dit(path: str) -> Dit:
    """Read what headers tell of a Wan DiT.

    Raises:
        ModelError: it is missing, damaged, incomplete, or no DiT that can be trained.
    """
    weights, place = Weights(path=path), Path(path)
    files = _files(weights)
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= {to_diffusers(name): each for name, each in _tensors(file).items()}
    config = network_config(weights) or {} if files[0].name == "config.json" else {}
    named = config.get("_class_name", _CLASSES[0])
    try:
        if named not in _CLASSES:
            raise ValueError(f"is of class {named}, not {_CLASSES[0]}")
        _refuse_kind(tensors)
        tensors = {name: each for name, each in tensors.items() if IGNORED not in name}
        by_name = {name: each.shape for name, each in tensors.items()}
        shapes = shapes_of(by_name, config)
        faults = list(tensor_faults(shapes, by_name))
        if faults:
            more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
            raise ValueError(f"{faults[0]}{more}")
    except ValueError as error:
        raise ModelError(str(error), where=place, hint=HINT) from None
    own = config if named == _CLASSES[0] else {k: v for k, v in config.items() if k == "eps"}
    return Dit(place, files, tensors, shapes, {**own, **shapes.settings()})


def _files(weights: Weights) -> list[Path]:
    """Return the files of a network; beside a single file, a config.json counts if it is Wan's."""
    place = Path(weights.path or "")
    refuse_missing(weights)
    if place.is_file() and place.suffix != ".safetensors":
        raise ModelError("is not a .safetensors file", where=place, hint=HINT)
    files = weights_files(weights)
    if place.is_file() and config_file(weights) is not None:
        try:
            config = network_config(weights) or {}
        except ModelError:  # damaged, and perhaps of another file
            config = {}
        wan = config.get("_class_name") in _CLASSES
        return files if wan and _fits(config, files[-1]) else files[1:]
    if any(file.suffix not in (".json", ".safetensors") for file in files):
        raise ModelError("holds no .safetensors file", where=place, hint=HINT)
    return files


def _fits(config: Mapping[str, Any], file: Path) -> bool:
    """Whether a configuration is of the width of a file's network."""
    width = config.get("dim")
    if width is None:
        sizes = (config.get("num_attention_heads"), config.get("attention_head_dim", _HEAD))
        width = math.prod(each if isinstance(each, int) else 0 for each in sizes)
    embedding = "patch_embedding.weight"
    tensors = _tensors(file).items()
    return [each.shape[:1] for name, each in tensors if to_diffusers(name) == embedding] == [
        (width,)
    ]


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return read_head(file).tensors
    except ValueError as error:
        raise ModelError(str(error), where=file, hint="copy it again") from None
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise ModelError(what, where=file, hint="check the file's permissions") from None


def _refuse_kind(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what is no DiT of Wan, and numbers that cannot be trained over, by ValueError."""
    kinds = kinds_of(tensors)
    if not kinds or kinds[0][0] != DIT:
        raise ValueError(f"is {f'a {kinds[0][0]}' if kinds else 'another network'}, not a {DIT}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _NUMBERS:
            bits = "fp8" if tensor.dtype.startswith("F8") else tensor.dtype
            raise ValueError(
                f"holds {name} in {bits}; the trainer wan needs weights in bf16, fp16 or float32"
            )


def check_targets(
    targets: Iterable[str], shapes: Mapping[str, Sequence[int]], where: str
) -> list[str]:
    """Return the layers that get a LoRA, and refuse names of layers that cannot.

    peft's rule: a layer's name, or its end after a dot. musubi-tuner's LoRA knows the linear layers
    of the blocks alone.

    Args:
        targets: the trainer's `target_modules`.
        shapes: of all tensors by their names in diffusers.
        where: key of the targets in the configuration.

    Raises:
        TrainingError: a name fits nothing, or a layer that is none of these.
    """
    layers = {
        name.removesuffix(".weight"): len(shape)
        for name, shape in shapes.items()
        if name.endswith(".weight")
    }
    found: set[str] = set()
    for target in targets:
        fit = [each for each in layers if each == target or each.endswith("." + target)]
        if not fit:
            raise TrainingError(
                f"no layer of the DiT is named `{target}`", where=where, hint=_USUAL
            )
        for layer in fit:
            if layers[layer] != 2 or not IN_BLOCK.match(layer):
                what = f"`{target}` fits {layer}, which is no linear layer of a block"
                raise TrainingError(what, where=where, hint=_USUAL)
        found |= set(fit)
    return sorted(found)


def trained_networks(model: _Networks) -> Iterator[ModelFile]:
    """Yield the networks that the trainer `wan` trains of a model, inspected."""
    if model.dit is None and model.dit_high_noise is None:
        yield ModelFile("dit", "", fault="is not set: there is no network to train")
    for key, path in _networks(model):
        try:
            dit = read_dit(path)
        except ModelError as error:
            yield ModelFile(key, error.where or path, fault=error.what)
            continue
        content = Content(DIT, dit.tensors)
        yield ModelFile(key, path, content, _other_model(model, dit, content) or "")


def _other_model(model: _Networks, dit: Dit, content: Content) -> str | None:
    """Return why a DiT is that of another task."""
    if model.task is not None and (fault := other_task(model.task, content)):
        return fault
    takes_image = dit.shapes.image_dim is not None
    if takes_image != model.needs_clip:
        words = ("takes", "needs none") if takes_image else ("does not take", "needs it")
        return (
            f"is a Wan DiT that {words[0]} a CLIP image encoder's output; {model.task} {words[1]}"
        )
    return None


def _networks(model: _Networks) -> Iterator[tuple[str, str]]:
    """Yield the networks that a model names, by key."""
    if model.dit is not None:
        yield "dit", model.dit
    if model.dit_high_noise is not None:
        yield "dit_high_noise", model.dit_high_noise


def check_networks(model: _Networks, model_name: str, targets: Iterable[str], where: str) -> None:
    """Refuse networks that the trainer `wan` cannot train, before anything is encoded.

    Args:
        model: a Wan model, whose files are there.
        model_name: its name in the configuration.
        targets: the trainer's `target_modules`.
        where: their key in the configuration.

    Raises:
        ModelError: a network is missing, damaged, of another kind or of another task.
        TrainingError: one of the targets fits no layer.
    """
    for file in trained_networks(model):
        if file.fault:
            fault = f"{file.place}: {file.fault}" if file.place else file.fault
            raise ModelError(fault, where=f"models.{model_name}.{file.key}", hint=HINT)
        assert file.content is not None
        shapes = {name: tensor.shape for name, tensor in file.content.tensors.items()}
        check_targets(targets, shapes, where)


def dit_digest(model: _Networks, file_digest: FileDigest = digest.of_file) -> str:
    """Return the digest of the networks that are trained; planning passes its memo's function.

    Raises:
        ModelError: files are missing or cannot be read.
    """
    found = []
    for key, path in _networks(model):
        found.append([key, weights_digest(Weights(path=path), file_digest, _files)])
    return digest.of_value(found)
