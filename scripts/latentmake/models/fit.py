"""Check that the networks of a model are complete and fit each other, before encoding starts.

The checks read headers and configurations, not the values of tensors. Weights on the hub pass.
Paths that do not exist pass, too: other checks report them, or the model is on another machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from latentmake.base.errors import ModelError
from latentmake.base.regular import read_text
from latentmake.config.architectures import Inputs
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.formats.safetensors import POINTER, Tensor, is_pointer
from latentmake.models import headers, tensors
from latentmake.models.checkpoints import vae_config
from latentmake.models.files import (
    checkpoint_of,
    network_config,
    scripted_files,
    tokenizer_files,
    weights_files,
)
from latentmake.models.shapes import projection_shape, text_width
from latentmake.models.tensors import Config, Shapes

_FEW = 4  # fewest blocks, and tensors in a block, from which a gap can be inferred
_HINT = "copy it again, or name another one"
_TOGETHER = "the parts of a model must come from the same base model"
# Channels of a UNet's input -> its purpose.
_PURPOSES = {5: "depth", 7: "upscaling", 8: "edits by instructions", 9: "inpainting"}
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")  # ends of names, for 8-bit weights
_IN_16_BITS = "name a file in bf16, fp16 or float32"
_ENCODERS = {"CLIP-L": 768, "OpenCLIP-H": 1024, "CLIP-G": 1280}  # their published widths
# Class name or model type in a config.json -> kind of text encoder.
_KINDS = {
    **{"CLIPTextModelWithProjection": "CLIP", "clip": "CLIP", "clip_text_model": "CLIP"},
    **{"t5": "T5", "umt5": "T5"},
}
# Token embeddings of a text encoder: [vocabulary, width].
_TABLE = re.compile(r"(^|\.)(token_embedding|embed_tokens|shared|word_embeddings)\.weight$")
# Stack of similar blocks, number of a block, name inside the block. A UNet's blocks are excluded:
# they differ.
_STACK = re.compile(
    r"(.*?(?<!down_)(?<!up_)(?<!input_)(?<!output_)(?:blocks?|layers))\.(\d+)\.(.+)"
)


class Network(NamedTuple):
    """Header and configuration of a network.

    Attributes:
        place: path of the network.
        tensors: tensors by name; for a part of a checkpoint, without the part's prefix.
        config: configuration; None if there is none on this disk.
        prefix: prefix of the part of a checkpoint; "" for other networks.
    """

    place: str
    tensors: Mapping[str, Tensor]
    config: Config | None = None
    prefix: str = ""

    def refused(self, what: str, hint: str = _HINT) -> ModelError:
        """Return the error that this network cannot be used."""
        return ModelError(what, where=self.place, hint=hint)


def check(model: Model, trains: bool) -> None:
    """Refuse the first network that cannot be used; see `checks.check_networks` for the arguments.

    Raises:
        ModelError: names the key of the model.
    """
    spec, sizes = model.spec, dict[str, int | None]()
    if spec.encodes and spec.scripts is None:
        with _at("vae"):
            sizes["vae"] = _autoencoder(model.vae)
        for index in range(len(model.text)):
            with _at("text"):
                sizes[f"text.{index}" if index else "text"] = _text_encoder(model, index)
        with _at("text"):
            _check_order(model)
    else:
        for key in ("vae", "clip", "image_encoder", "text", "text.1", "text.2"):
            with _at(key.partition(".")[0]):
                sizes[key] = _encoder_of_program(model.weights(key), key, wan=spec.encodes)
    if not trains:
        return
    if model.unet is not None:
        with _at("unet"):
            _check_unet(model, model.unet, sizes)
    program = spec.strategies or spec.scripts
    for key in ("checkpoint", "dit", "dit_high_noise"):
        path = getattr(model, key)
        if path is None or program is None:
            continue
        with _at(key):
            if spec.checkpoints:
                unet = Weights(path=path, subfolder="unet")
                folder = Weights(path=str(Path(path, "unet")))
                _check_unet(model, folder if Path(path).is_dir() else unet, sizes)
            else:
                _check_network(path, program.inputs, sizes, scaled=program.reads_scales)


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Turn the error of a file into an error of a key of the model; its message names the file."""
    try:
        yield
    except ModelError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        raise ModelError(what, where=key, hint=error.hint) from None


# -- networks of our encoders and of the trainer `sd` ---------------------------------------------


def _read(weights: Weights) -> Network | None:
    """Read a local network; return None if files of it are missing; raises ModelError."""
    if weights.path is None or not Path(weights.path).exists():
        return None
    if checkpoint := checkpoint_of(weights):
        if checkpoint.path.suffix != ".safetensors" or checkpoint.prefix is None:
            return None
        prefix, held = checkpoint.own()
        own = {name.removeprefix(prefix): tensor for name, tensor in held.items()}
        if checkpoint.part == "unet" and not any(name.startswith("time_embed.") for name in own):
            return None  # not a UNet of Stable Diffusion
        return Network(weights.path, own, checkpoint.config(), prefix)
    try:
        files = weights_files(weights)
    except ModelError:
        return None
    return Network(weights.path, _held(files), network_config(weights))


def _held(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors in all files of a network.

    Raises:
        ModelError: a file cannot be read, or a tensor is missing that the index names.
    """
    tensors_by_name, named = dict[str, Tensor](), dict[str, str]()
    for file in files:
        try:
            if file.name.endswith(".index.json"):
                named |= json.loads(read_text(file))["weight_map"]
            elif file.suffix != ".json":
                tensors_by_name |= headers.tensors_of(file)
        except (ValueError, LookupError, TypeError) as error:
            what = str(error) if file.suffix != ".json" else "is not an index of weights"
            raise ModelError(what, where=file, hint=_HINT) from None
    if lacks := [name for name in named if name not in tensors_by_name]:
        file = next(index for index in files if index.name.endswith(".index.json"))
        what = f"names {lacks[0]}, which {named[lacks[0]]} does not hold"
        raise ModelError(what, where=file, hint=_HINT)
    return tensors_by_name


def _check_complete(
    network: Network,
    expected: Shapes,
    held: Mapping[str, Tensor],
    *,
    strict: bool = False,
    fp8: bool = False,
) -> None:
    """Refuse a network whose tensors differ from the expected ones; see `tensors.misfit`.

    A network passes if fewer than half of the expected names occur: its names are not known.
    """
    if any(name.endswith(_SCALES) for name in held):
        raise network.refused("is in 8 bits with scales, which cannot be read", _IN_16_BITS)
    if 2 * sum(name in held for name in expected) < len(expected):
        return
    if fault := tensors.misfit(expected, held, strict=strict, fp8=fp8):
        raise network.refused(fault)


def _inside(prefix: str, tensors_by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names contain a prefix, without the prefix if they begin with it."""
    names = (name for name in tensors_by_name if prefix in name)
    return {name.removeprefix(prefix): tensors_by_name[name] for name in names}


def _refuse_class(network: Network, name: str, *others: str) -> None:
    own = (network.config or {}).get("_class_name", name)
    if own not in (name, *others):
        raise network.refused(f"is of class {own}, not {name}", "name another folder")


def _autoencoder(weights: Weights) -> int | None:
    """Check an AutoencoderKL; return the number of its latents' channels, or None if unknown."""
    if (network := _read(weights)) is None:
        return None
    _refuse_class(network, "AutoencoderKL", tensors.FLUX2_VAE)
    wrapped = _inside("first_stage_model.", network.tensors)
    held = (wrapped or network.tensors).items()
    layers = (pair for pair in held if not pair[0].startswith(tensors.STATISTICS))
    own = {tensors.vae_layer(name): tensor for name, tensor in layers}
    sized = {name: tensor.shape for name, tensor in own.items() if tensor.dtype}
    try:
        config = network.config or vae_config(sized)
        expected = tensors.vae(config)
        original = any(name.startswith("encoder.down.") for name in own)
        if expected and original:
            expected = tensors.renamed(expected, tensors.original_vae_layer, config)
    except (LookupError, TypeError, ValueError):
        return None  # neither configuration nor shapes give the sizes: the loader reports it
    if expected is not None:
        plain = not (original or network.prefix or wrapped)
        _check_complete(network, expected, own, strict=plain and bool(sized), fp8=True)
    return int(config.get("latent_channels", 4))


def _text_encoder(model: Model, index: int) -> int | None:
    """Check a CLIP or T5 and its tokenizer; return the width of its embeddings, or None."""
    place, spec = model.text[index], model.spec
    if (network := _read(place)) is None:
        return None
    if network.config is None:
        what = "a single file does not say what network it holds"
        raise network.refused(what, "name the folder of its config.json as `config`")
    config, named = network.config, spec.text_encoders[index] if spec.text_encoders else ""
    names = [*(config.get("architectures") or ()), str(config.get("model_type"))]
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None or (named and kind != ("T5" if named == "T5" else "CLIP")):
        wanted = f"a {named}" if named else "a CLIP or T5"
        raise network.refused(f"is of type {names[-1]}, not {wanted}", f"name {wanted}")
    own = config.get("text_config") or config
    try:
        if kind == "T5":
            expected = tensors.t5(own, every_bias=names[-1] == "umt5")
        else:
            projects = "CLIPTextModelWithProjection" in names
            projects = spec.clips[index].projects if named else projects
            expected = tensors.clip(own, projects=projects)
    except LookupError:
        expected = {}  # the configuration lacks sizes: do not compare
    except (TypeError, ValueError):
        raise network.refused("has a configuration that no network can have") from None
    held = {name.removeprefix("text_model."): tensor for name, tensor in network.tensors.items()}
    if "encoder.embed_tokens.weight" in held:  # T5 shares one table under two names
        held = {"shared.weight": held["encoder.embed_tokens.weight"]} | held
    if network.prefix.endswith("model."):
        expected = tensors.open_clip(expected)
    _check_complete(network, expected, held, fp8=True)
    width = own.get("hidden_size") or own.get("d_model")
    others = [name for name, published in _ENCODERS.items() if published == width]
    if named in _ENCODERS and others and named not in others:
        what = f"is {width} wide as {others[0]} is, and {named} is {_ENCODERS[named]}"
        raise network.refused(f"{what} wide", f"name {named} at this place of `text`")
    _check_tokenizer(place)
    return text_width(place)


def _check_tokenizer(place: TextWeights) -> None:
    try:
        files = tokenizer_files(place)
    except ModelError:
        return
    for file in files:
        if is_pointer(file):
            raise ModelError(POINTER, where=file, hint="run `git lfs pull`")


def _check_order(model: Model) -> None:
    """Refuse two CLIP text encoders in the wrong order."""
    clips = [config or {} for config in map(_config, model.text[: len(model.spec.clips)])]
    if len(clips) < 2:
        return
    first, second = clips[:2]
    acts = [config.get("hidden_act") for config in (first, second)]
    widths = [config.get("hidden_size") or 0 for config in (first, second)]
    if acts == ["gelu", "quick_gelu"] or (all(widths) and widths[0] > widths[1]):
        names = " before ".join(model.spec.text_encoders[:2])
        what = f"{model.text[0].local} and {model.text[1].local} are in the wrong order"
        raise ModelError(what, hint=f"name {names}")


def _config(weights: Weights) -> Config | None:
    try:
        config = network_config(weights)
    except ModelError:
        return None
    return config and (config.get("text_config") or config)


def _check_unet(model: Model, weights: Weights, sizes: Mapping[str, int | None]) -> None:
    """Refuse a UNet that is incomplete, or does not take the latents or embeddings of the model."""
    if (network := _read(weights)) is None:
        return
    _refuse_class(network, "UNet2DConditionModel")
    if (config := network.config) is None:
        what = "a single file needs the configuration that describes it"
        raise network.refused(what, "set the UNet's `config` to a folder with its config.json")
    own = _inside("model.diffusion_model.", network.tensors)
    original = bool(own or network.prefix)
    try:
        _check_channels(network, config, sizes.get("vae"))
        expected = tensors.unet(config)
        if expected and original:
            expected = tensors.renamed(expected, tensors.original_unet_layer, config)
        if expected is not None:
            held = own or network.tensors
            _check_complete(network, expected, held, strict=not original)
        _check_text(model, network, config, sizes)
    except LookupError:
        return  # the configuration lacks sizes
    except (TypeError, ValueError):
        raise network.refused("has a configuration that no network can have") from None


def _check_channels(network: Network, config: Config, channels: int | None) -> None:
    takes, gives = config.get("in_channels", 4), config.get("out_channels", 4)
    if takes != gives:
        purpose = f"one for {_PURPOSES[takes]}" if takes in _PURPOSES else "no plain one"
        what = f"this UNet takes {takes} channels and gives {gives}: it is {purpose}"
        raise network.refused(f"{what}, which cannot be trained", "name the UNet of a base model")
    if channels not in (None, takes):
        what = f"this UNet takes latents of {takes} channels, and those of the VAE have {channels}"
        raise network.refused(what, _TOGETHER)


def _check_text(
    model: Model, network: Network, config: Config, sizes: Mapping[str, int | None]
) -> None:
    xl, texts = config.get("addition_embed_type") is not None, model.text
    widths = [sizes.get(f"text.{index}" if index else "text") for index in range(len(texts))]
    if not all(widths) or xl != (len(texts) > 1):
        return  # widths are not known, or the check of the architecture refuses the model
    width = sum(filter(None, widths))
    takes = config.get("cross_attention_dim", 1280)
    takes = {*takes} if isinstance(takes, (list, tuple)) else {takes}
    if model.text_projection is None and takes != {width}:
        wide = " and ".join(map(str, sorted(takes)))
        what = f"this UNet takes embeddings {wide} wide, and those of `text` are {width} wide"
        further = "" if xl else "; or set the model's `text_projection` to `new`"
        raise network.refused(what, _TOGETHER + further)
    if model.text_projection not in (None, "new") and len(takes) == 1:
        _check_projection(str(model.text_projection), width, *takes)
    if not xl:
        return
    own = (_config(texts[-1]) or {}).get("projection_dim", 512)
    times = 6 * (config.get("addition_time_embed_dim") or 256)
    if own != (vector := config["projection_class_embeddings_input_dim"] - times):
        what = f"this UNet takes a vector of {vector} numbers a caption"
        raise network.refused(f"{what}, and the last encoder of `text` makes {own}", _TOGETHER)


def _check_projection(path: str, width: int, takes: int) -> None:
    if not Path(path).exists():
        return
    gives, own = projection_shape(path)
    if (own, gives) != (width, takes):
        what = f"projects from {own} to {gives}, but the captions are {width} wide"
        hint = "name another projection, or set `text_projection: new`"
        raise ModelError(f"{what} and the UNet takes {takes}", where=path, hint=hint)


# -- networks of other programs -------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """Return the weight files and the index of a network; none if a file is missing."""
    try:
        files = scripted_files(path)
    except ModelError:
        return []
    ends = (*headers.SUFFIXES, ".index.json")
    files = [file for file in files if file.name.endswith(ends)]
    return [file for file in files if file.parent in (path, path.parent)]


def _encoder_of_program(weights: Weights | None, key: str, *, wan: bool) -> int | None:
    """Check an encoder; return a VAE's number of channels or an embedding's width, or None.

    With `wan`, missing tensors are found by their names, too: Latentmake knows all names of Wan's
    encoders, since it can encode with them itself.
    """
    if weights is None or weights.path is None or not (files := _files(Path(weights.path))):
        return None
    held = _held(files)
    network = Network(weights.path, held)
    _refuse_gaps(network)
    if wan:
        _check_complete(network, {}, held)
        try:
            lacks = _missing_of_wan(key, held, _config(weights) or {})
        except (LookupError, TypeError, ValueError):
            raise network.refused("has a configuration that no network can have") from None
        if fault := tensors.faults(lacks):
            raise network.refused(fault)
    if key == "vae":
        vae = headers.vae_of(held) if all(tensor.shape for tensor in held.values()) else None
        return None if vae is None else vae.channels
    tables = [tensor.shape for name, tensor in held.items() if _TABLE.search(name)]
    return next((shape[1] for shape in tables if len(shape) == 2), None)


def _missing_of_wan(key: str, held: Iterable[str], config: Config) -> list[str]:
    """Return the names that a VAE or umT5 of Wan lacks; none if the file uses unknown names.

    `config` is the configuration in the network's folder; empty for a file of Wan's release.
    """
    names, prefix = {*held}, ""
    if key == "vae":
        expected, original = [*tensors.wan_vae(config)], tensors.original_wan_vae
    elif key == "text":
        # In files of complete models, the original names have a prefix, too.
        prefix, original = "encoder.", tensors.original_t5
        blocks = (re.match(r"(?:encoder\.)?blocks?\.(\d+)\.", name) for name in names)
        number = max((int(match[1]) for match in blocks if match), default=-1) + 1
        sizes = dict.fromkeys(("d_model", "d_ff", "num_heads", "d_kv", "vocab_size"), 1)
        sized = {**sizes, "num_layers": number, "feed_forward_proj": "gated-gelu"}
        expected = [*tensors.t5(sized, every_bias=True)]
        if "encoder.embed_tokens.weight" in names:  # T5 shares one table under two names
            names.add("shared.weight")
    else:
        return []
    names = {name.removeprefix(prefix) for name in names}
    for form in (expected, [original(name) for name in expected]):
        lacks = [name for name in form if name.removeprefix(prefix) not in names]
        if len(lacks) < len(form) / 2:
            return lacks
    return []


def _check_network(
    path: str, inputs: Inputs, sizes: Mapping[str, int | None], *, scaled: bool
) -> None:
    """Refuse a network that is incomplete, or does not take the outputs of the model's encoders."""
    network = Network(path, _held(_files(Path(path))))
    _refuse_gaps(network)
    if not scaled and any(name.endswith(_SCALES) for name in network.tensors):
        raise network.refused("is in 8 bits with scales, which cannot be trained", _IN_16_BITS)
    for key, layers in inputs.items():
        for layer, times in layers.items():
            for name, tensor in network.tensors.items():
                if name != layer and not name.endswith(f".{layer}"):
                    continue
                takes = tensor.shape[1:2] if len(tensor.shape) > 1 else tensor.shape
                size = sizes.get(key)
                if size and takes and takes != (size * times,):
                    what = f"takes {takes[0]} numbers by {name}, and `{key}` makes {size * times}"
                    raise network.refused(what, _TOGETHER)


def _refuse_gaps(network: Network) -> None:
    """Refuse a network if one block lacks a tensor that the other blocks of its stack have.

    The last block may differ, as it does in Stable Diffusion 3.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in network.tensors:
        if match := _STACK.match(name):
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    for stack, blocks in stacks.items():
        if len(blocks) < _FEW:
            continue
        (usual, count), *_ = Counter(map(frozenset, blocks.values())).most_common(1)
        numbers = range(max(blocks))
        gaps = {number: usual - blocks.get(number, set()) for number in numbers}
        odd = {number: lacks for number, lacks in gaps.items() if lacks}
        if odd and len(usual) >= _FEW and len(odd) <= max(1, len(blocks) // 10) < count:
            number, lacks = next(iter(odd.items()))
            raise network.refused(f"lacks {stack}.{number}.{min(lacks)}")
