"""Checks that the networks of a model are complete and fit each other, before anything is encoded.

Headers and configurations tell: no tensor is read. Weights on the hub pass, and so does a place
where nothing lies: others say so, or the model lies on another machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from latentmake.config.architectures import Inputs
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.files.safetensors import POINTER, Tensor, is_pointer
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
from latentmake.regular import read_text

_FEW = 4  # blocks, and tensors of a block: fewer tell nothing
_HINT = "copy it again, or name another one"
_TOGETHER = "the parts of a model must come from the same base model"
_PURPOSES = {5: "depth", 7: "upscaling", 8: "edits by instructions", 9: "inpainting"}
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")
_IN_16_BITS = "name a file in bf16, fp16 or float32"
_ENCODERS = {"CLIP-L": 768, "OpenCLIP-H": 1024, "CLIP-G": 1280}  # widths of the published ones
# Name of a class, or model type, in a config.json -> what it is.
_KINDS = {
    **{"CLIPTextModelWithProjection": "CLIP", "clip": "CLIP", "clip_text_model": "CLIP"},
    **{"t5": "T5", "umt5": "T5"},
}
_TABLE = re.compile(r"(^|\.)(token_embedding|embed_tokens|shared|word_embeddings)\.weight$")
_STACK = re.compile(
    r"(.*?(?<!down_)(?<!up_)(?<!input_)(?<!output_)(?:blocks?|layers))\.(\d+)\.(.+)"
)


class Network(NamedTuple):
    """What headers and configuration tell of a network.

    Attributes:
        place: its path.
        tensors: by name; of a part of a checkpoint, without the prefix of the part.
        config: None where none is on this disk.
        prefix: of a part of a checkpoint; "" of others.
    """

    place: str
    tensors: Mapping[str, Tensor]
    config: Config | None = None
    prefix: str = ""

    def refused(self, what: str, hint: str = _HINT) -> ModelError:
        """Return the error of this network."""
        return ModelError(what, where=self.place, hint=hint)


def check(model: Model, trains: bool) -> None:
    """Refuse the first network that cannot be used, by a ModelError at its key of the model.

    See `checks.check_networks` for the arguments.
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
    known = spec.strategies or spec.scripts
    for key in ("checkpoint", "dit", "dit_high_noise"):
        path = getattr(model, key)
        if path is None or known is None:
            continue
        with _at(key):
            if spec.checkpoints:
                unet = Weights(path=path, subfolder="unet")
                folder = Weights(path=str(Path(path, "unet")))
                _check_unet(model, folder if Path(path).is_dir() else unet, sizes)
            else:
                _check_network(path, known.inputs, sizes, scaled=known.reads_scales)


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Turn the error of a file into that of a key of the model, which names the file."""
    try:
        yield
    except ModelError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        raise ModelError(what, where=key, hint=error.hint) from None


# -- networks of our encoders and of the trainer `sd` ---------------------------------------------


def _read(weights: Weights) -> Network | None:
    """Return a local network; None where nothing, or not all, of it lies; raises ModelError."""
    if weights.path is None or not Path(weights.path).exists():
        return None
    if whole := checkpoint_of(weights):
        if whole.path.suffix != ".safetensors" or whole.prefix is None:
            return None
        prefix, held = whole.own()
        own = {name.removeprefix(prefix): each for name, each in held.items()}
        if whole.part == "unet" and not any(name.startswith("time_embed.") for name in own):
            return None  # none of Stable Diffusion
        return Network(weights.path, own, whole.config(), prefix)
    try:
        files = weights_files(weights)
    except ModelError:
        return None
    return Network(weights.path, _held(files), network_config(weights))


def _held(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of all files of a network; all that its index names must be there."""
    found, named = dict[str, Tensor](), dict[str, str]()
    for file in files:
        try:
            if file.name.endswith(".index.json"):
                named |= json.loads(read_text(file))["weight_map"]
            elif file.suffix != ".json":
                found |= headers.tensors_of(file)
        except (ValueError, LookupError, TypeError) as error:
            what = str(error) if file.suffix != ".json" else "is not an index of weights"
            raise ModelError(what, where=file, hint=_HINT) from None
    if lacks := [name for name in named if name not in found]:
        file = next(x for x in files if x.name.endswith(".index.json"))
        what = f"names {lacks[0]}, which {named[lacks[0]]} does not hold"
        raise ModelError(what, where=file, hint=_HINT)
    return found


def _check_complete(
    network: Network,
    expected: Shapes,
    held: Mapping[str, Tensor],
    *,
    strict: bool = False,
    fp8: bool = False,
) -> None:
    """Refuse a network whose tensors, in the same names, are not those; see `tensors.misfit`."""
    if any(name.endswith(_SCALES) for name in held):
        raise network.refused("is in 8 bits with scales, which cannot be read", _IN_16_BITS)
    if 2 * sum(name in held for name in expected) < len(expected):
        return  # in names that are not known
    if fault := tensors.misfit(expected, held, strict=strict, fp8=fp8):
        raise network.refused(fault)


def _refuse_class(network: Network, name: str, *others: str) -> None:
    own = (network.config or {}).get("_class_name", name)
    if own not in (name, *others):
        raise network.refused(f"is of class {own}, not {name}", "name another folder")


def _autoencoder(weights: Weights) -> int | None:
    """Check an AutoencoderKL; return the number of its latents' channels, if it is known."""
    if (network := _read(weights)) is None:
        return None
    _refuse_class(network, "AutoencoderKL", tensors.FLUX2_VAE)
    first = "first_stage_model."
    own = {x.removeprefix(first): each for x, each in network.tensors.items() if first in x}
    own = {
        tensors.vae_layer(name): each
        for name, each in (own or network.tensors).items()
        if not name.startswith(tensors.STATISTICS)
    }
    sized = {name: each.shape for name, each in own.items() if each.dtype}
    try:
        config = network.config or vae_config(sized)
        expected = tensors.vae(config)
        original = any(name.startswith("encoder.down.") for name in own)
        if expected and original:
            expected = tensors.renamed(expected, tensors.original_vae_layer, config)
    except (LookupError, TypeError, ValueError):
        return None  # neither configuration nor shapes tell; its loader says so
    if expected is not None:
        plain = not (original or network.prefix or first in "".join(network.tensors))
        _check_complete(network, expected, own, strict=plain and bool(sized), fp8=True)
    return int(config.get("latent_channels", 4))


def _text_encoder(model: Model, index: int) -> int | None:
    """Check a CLIP or T5 and its tokenizer; return the width of its embeddings, if it is known."""
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
        expected = {}  # it does not tell
    except (TypeError, ValueError):
        raise network.refused("has a configuration that no network can have") from None
    held = {name.removeprefix("text_model."): each for name, each in network.tensors.items()}
    if "encoder.embed_tokens.weight" in held:  # of the same values
        held = {"shared.weight": held["encoder.embed_tokens.weight"]} | held
    if network.prefix.endswith("model."):
        expected = tensors.open_clip(expected)
    _check_complete(network, expected, held, fp8=True)
    width = own.get("hidden_size") or own.get("d_model")
    others = [name for name, each in _ENCODERS.items() if each == width]
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
    """Refuse two CLIPs of which each stands in the place of the other."""
    clips = [config or {} for config in map(_config, model.text[: len(model.spec.clips)])]
    if len(clips) < 2:
        return
    first, second = clips[:2]
    acts = [each.get("hidden_act") for each in (first, second)]
    widths = [each.get("hidden_size") or 0 for each in (first, second)]
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
    """Refuse a UNet that is incomplete, or takes other latents or embeddings than are made."""
    if (network := _read(weights)) is None:
        return
    _refuse_class(network, "UNet2DConditionModel")
    if (config := network.config) is None:
        what = "a single file needs the configuration that describes it"
        raise network.refused(what, "set the UNet's `config` to a folder with its config.json")
    prefix = "model.diffusion_model."
    own = {x.removeprefix(prefix): each for x, each in network.tensors.items() if prefix in x}
    original = bool(own or network.prefix)
    try:
        _check_channels(network, config, sizes.get("vae"))
        expected = tensors.unet(config)
        if expected and original:
            expected = tensors.renamed(
                expected, lambda layer, _: tensors.original_unet_layer(layer, config), config
            )
        if expected is not None:
            held = own or network.tensors
            _check_complete(network, expected, held, strict=not original)
        _check_text(model, network, config, sizes)
    except LookupError:
        return  # its configuration does not tell
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
        return  # what is not known, or is refused with the architecture
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
    """Return the files of weights of a network, and its index, if all are there."""
    try:
        files = scripted_files(path)
    except ModelError:
        return []
    ends = (*headers.SUFFIXES, ".index.json")
    return [x for x in files if x.name.endswith(ends) and x.parent in (path, path.parent)]


def _encoder_of_program(weights: Weights | None, key: str, *, wan: bool) -> int | None:
    """Check an encoder; return the channels of a VAE, or the width of embeddings, if known.

    Those of Wan, which Latentmake encodes with too, have names that are known.
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
        vae = headers.vae_of(held) if all(each.shape for each in held.values()) else None
        return None if vae is None else vae.channels
    tables = [each.shape for name, each in held.items() if _TABLE.search(name)]
    return next((shape[1] for shape in tables if len(shape) == 2), None)


def _missing_of_wan(key: str, held: Iterable[str], config: Config) -> list[str]:
    """Return the names that a VAE or umT5 of Wan lacks; none where its names are not known.

    `config` is that of its folder; empty of a file of Wan's release.
    """
    names, prefix = {*held}, ""
    if key == "vae":
        expected, original = [*tensors.wan_vae(config)], tensors.original_wan_vae
    elif key == "text":
        # Files of complete models have a prefix before the original names, too.
        prefix, original = "encoder.", tensors.original_t5
        blocks = (re.match(r"(?:encoder\.)?blocks?\.(\d+)\.", name) for name in names)
        number = max((int(each[1]) for each in blocks if each), default=-1) + 1
        sizes = dict.fromkeys(("d_model", "d_ff", "num_heads", "d_kv", "vocab_size"), 1)
        sized = {**sizes, "num_layers": number, "feed_forward_proj": "gated-gelu"}
        expected = [*tensors.t5(sized, every_bias=True)]
        if "encoder.embed_tokens.weight" in names:  # of the same values
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
    """Refuse a network that is incomplete, or takes other latents or embeddings than are made."""
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
    """Refuse a network of which one block lacks what all of its kind have.

    The last block may differ, as that of Stable Diffusion 3 does.
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
        odd = {x: usual - blocks.get(x, set()) for x in numbers if usual - blocks.get(x, set())}
        if odd and len(usual) >= _FEW and len(odd) <= max(1, len(blocks) // 10) < count:
            number, lacks = next(iter(odd.items()))
            raise network.refused(f"lacks {stack}.{number}.{min(lacks)}")
