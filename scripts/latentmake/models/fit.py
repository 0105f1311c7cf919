"""Check that the networks of a model are complete and fit each other, before encoding starts.

The checks read headers and configurations, not the values of tensors. Weights on the hub pass.
Paths that do not exist pass, too: other checks report them, or the model is on another machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from latentmake.base.errors import ModelError
from latentmake.base.regular import read_text
from latentmake.config.architectures import TEXT_ENCODERS
from latentmake.config.makers import Inputs
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.formats.safetensors import POINTER, Tensor, is_pointer
from latentmake.models import headers, tensors
from latentmake.models.checkpoints import prefix_of, vae_config
from latentmake.models.files import (
    checkpoint_of,
    network_config,
    projection_shape,
    scripted_files,
    text_width,
    tokenizer_files,
    weights_files,
)
from latentmake.models.tensors import Config, Shapes

_FEW = 4  # fewest blocks, and tensors in a block, from which a gap can be inferred
_HINT = "copy it again, or name another one"
_IMPOSSIBLE = "has a configuration that no network can have"
_TOGETHER = "the parts of a model must come from the same base model"
# Channels of a UNet's input -> its purpose.
_PURPOSES = {5: "depth", 7: "upscaling", 8: "edits by instructions", 9: "inpainting"}
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")  # ends of names, for 8-bit weights
# Class name or model type in a config.json -> kind of text encoder.
_KINDS = {
    **{"CLIPTextModelWithProjection": "CLIP", "clip": "CLIP", "clip_text_model": "CLIP"},
    **{"t5": "T5", "umt5": "T5"},
}
# Stack of similar blocks, number of a block, name inside the block. A UNet's blocks are excluded:
# they differ.
_STACK = re.compile(
    r"(.*?(?<!down_)(?<!up_)(?<!input_)(?<!output_)(?:blocks?|layers))\.(\d+)\.(.+)"
)


def check(model: Model, trains: bool) -> None:
    """Refuse the first network that cannot be used; see `inspection.check_networks`.

    Raises:
        ModelError: names the key of the model.
    """
    spec, sizes = model.spec, dict[str, int | None]()
    if spec.encodes_pictures:
        with _at("vae", model.vae):
            sizes["vae"] = _autoencoder(model.vae)
        for index, place in enumerate(model.text):
            with _at("text", place):
                sizes[f"text.{index}" if index else "text"] = _text_encoder(model, index)
        with _at("text"):
            _check_order(model)
    else:
        for key in ("vae", "clip", "image_encoder", "text", "text.1", "text.2"):
            weights = model.weights(key)
            with _at(key.partition(".")[0], weights):
                sizes[key] = _encoder_of_program(weights, key, wan=spec.encodes)
    if not trains:
        return
    if model.unet is not None:
        with _at("unet", model.unet):
            _check_unet(model, model.unet, sizes)
    for key in ("checkpoint", "dit", "dit_high_noise"):
        path = getattr(model, key)
        if path is None or not spec.network:
            continue
        unet = Weights(path=path, subfolder="unet")
        if spec.checkpoints and Path(path).is_dir():
            unet = Weights(path=str(Path(path, "unet")))
        with _at(key, unet):
            if spec.checkpoints:
                _check_unet(model, unet, sizes)
            else:
                _check_network(path, spec.inputs, sizes, scaled=spec.reads_scales)


@contextmanager
def _at(key: str, weights: Weights | None = None) -> Iterator[None]:
    """Turn the error of a network into an error of a key of the model.

    The message names the file. If the error does not say which, it names the path of `weights`.
    """
    try:
        yield
    except ModelError as error:
        where = error.where or (weights and weights.path)
        what = f"{where}: {error.what}" if where else error.what
        raise ModelError(what, where=key, hint=error.hint) from None


# -- networks of our encoders and of the trainer `sd` ---------------------------------------------


def _read(weights: Weights) -> tuple[Mapping[str, Tensor], Config | None, str] | None:
    """Read the header and the configuration of a local network.

    Returns:
        Its tensors by name, its configuration (None if there is none on this disk), and the prefix
        of a checkpoint's part, which the names omit. None if files are missing.

    Raises:
        ModelError: a file is damaged.
    """
    if weights.path is None or not Path(weights.path).exists():
        return None
    if checkpoint := checkpoint_of(weights):
        if checkpoint.path.suffix != ".safetensors":
            return None
        if prefix_of(checkpoint.part, checkpoint.tensors) is None:
            return None
        prefix, held = checkpoint.own()
        own = {name.removeprefix(prefix): tensor for name, tensor in held.items()}
        if checkpoint.part == "unet" and not any(name.startswith("time_embed.") for name in own):
            return None  # not a UNet of Stable Diffusion
        return own, checkpoint.config(), prefix
    try:
        files = weights_files(weights)
    except ModelError:
        return None
    return _held(files), network_config(weights), ""


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
    expected: Shapes, held: Mapping[str, Tensor], *, strict: bool = False, fp8: bool = False
) -> None:
    """Refuse a network whose tensors differ from the expected ones; see `tensors.misfit`.

    A network passes if fewer than half of the expected names occur: its names are not known.
    """
    _refuse_scales(held, "read")
    if 2 * sum(name in held for name in expected) < len(expected):
        return
    if fault := tensors.misfit(expected, held, strict=strict, fp8=fp8):
        raise ModelError(fault, hint=_HINT)


def _refuse_scales(names: Iterable[str], use: str) -> None:
    if any(name.endswith(_SCALES) for name in names):
        hint = "name a file in bf16, fp16 or float32"
        raise ModelError(f"is in 8 bits with scales, which cannot be {use}", hint=hint)


def _inside(prefix: str, tensors_by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names contain a prefix, without the prefix if they begin with it."""
    names = (name for name in tensors_by_name if prefix in name)
    return {name.removeprefix(prefix): tensors_by_name[name] for name in names}


def _refuse_class(config: Config | None, name: str, *others: str) -> None:
    own = (config or {}).get("_class_name", name)
    if own not in (name, *others):
        raise ModelError(f"is of class {own}, not {name}", hint="name another folder")


def _autoencoder(weights: Weights) -> int | None:
    """Check an AutoencoderKL; return the number of its latents' channels, or None if unknown."""
    if (network := _read(weights)) is None:
        return None
    held, config, prefix = network
    _refuse_class(config, "AutoencoderKL", tensors.FLUX2_VAE)
    wrapped = _inside("first_stage_model.", held)
    own = {
        tensors.vae_layer(name): tensor
        for name, tensor in (wrapped or held).items()
        if not name.startswith(tensors.STATISTICS)
    }
    sized = {name: tensor.shape for name, tensor in own.items() if tensor.dtype}
    try:
        config = config or vae_config(sized)
        expected = tensors.vae(config)
        original = any(name.startswith("encoder.down.") for name in own)
        if expected and original:
            expected = tensors.renamed(expected, tensors.original_vae_layer, config)
    except (LookupError, TypeError, ValueError):
        return None  # neither configuration nor shapes give the sizes: the loader reports it
    if expected is not None:
        plain = not (original or prefix or wrapped)
        _check_complete(expected, own, strict=plain and bool(sized), fp8=True)
    return int(config.get("latent_channels", 4))


def _text_encoder(model: Model, index: int) -> int | None:
    """Check a CLIP or T5 and its tokenizer; return the width of its embeddings, or None."""
    place, spec = model.text[index], model.spec
    if (network := _read(place)) is None:
        return None
    own_tensors, config, prefix = network
    if config is None:
        what = "a single file does not say what network it holds"
        raise ModelError(what, hint="name the folder of its config.json as `config`")
    named = spec.text_encoders[index] if spec.text_encoders else ""
    names = [*(config.get("architectures") or ()), str(config.get("model_type"))]
    kind = next((_KINDS[name] for name in names if name in _KINDS), None)
    if kind is None or (named and kind != ("T5" if named == "T5" else "CLIP")):
        wanted = f"a {named}" if named else "a CLIP or T5"
        raise ModelError(f"is of type {names[-1]}, not {wanted}", hint=f"name {wanted}")
    own = config.get("text_config") or config
    try:
        if kind == "T5":
            expected = dict(tensors.t5(own, every_bias=names[-1] == "umt5"))
        else:
            projects = "CLIPTextModelWithProjection" in names
            projects = spec.clips[index].projects if named else projects
            expected = dict(tensors.clip(own, projects=projects))
    except LookupError:
        expected = {}  # the configuration lacks sizes: do not compare
    except (TypeError, ValueError):
        raise ModelError(_IMPOSSIBLE, hint=_HINT) from None
    held = {name.removeprefix("text_model."): tensor for name, tensor in own_tensors.items()}
    if "encoder.embed_tokens.weight" in held:  # T5 shares one table under two names
        held = {"shared.weight": held["encoder.embed_tokens.weight"]} | held
    if prefix.endswith("model."):
        expected = tensors.open_clip(expected)
    _check_complete(expected, held, fp8=True)
    width = own.get("hidden_size") or own.get("d_model")
    others = [name for name, (_, published) in TEXT_ENCODERS.items() if published == width]
    if named and kind == "CLIP" and others and named not in others:
        what = f"is {width} wide as {others[0]} is, and {named} is {TEXT_ENCODERS[named][1]} wide"
        raise ModelError(what, hint=f"name {named} at this place of `text`")
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
    clips = [*map(_config, model.text[: len(model.spec.clips)])]
    if len(clips) < 2:
        return
    first, second = clips[:2]
    acts = [config.get("hidden_act") for config in (first, second)]
    widths = [config.get("hidden_size") or 0 for config in (first, second)]
    if acts == ["gelu", "quick_gelu"] or (all(widths) and widths[0] > widths[1]):
        names = " before ".join(model.spec.text_encoders[:2])
        what = f"{model.text[0].local} and {model.text[1].local} are in the wrong order"
        raise ModelError(what, hint=f"name {names}")


def _config(weights: Weights) -> Config:
    """Return the configuration of a network or of a CLIP's text half; empty if it is not known."""
    with suppress(ModelError):
        config = network_config(weights) or {}
        return config.get("text_config") or config
    return {}


def _check_unet(model: Model, weights: Weights, sizes: Mapping[str, int | None]) -> None:
    """Refuse a UNet that is incomplete, or does not take the latents or embeddings of the model."""
    if (network := _read(weights)) is None:
        return
    held, config, prefix = network
    _refuse_class(config, "UNet2DConditionModel")
    if config is None:
        what = "a single file needs the configuration that describes it"
        raise ModelError(what, hint="set the UNet's `config` to a folder with its config.json")
    own = _inside("model.diffusion_model.", held)
    original = bool(own or prefix)
    try:
        _check_channels(config, sizes.get("vae"))
        expected = tensors.unet(config)
        if expected and original:
            expected = tensors.renamed(expected, tensors.original_unet_layer, config)
        if expected is not None:
            _check_complete(expected, own or held, strict=not original)
        _check_text(model, config, sizes)
    except LookupError:
        return  # the configuration lacks sizes
    except (TypeError, ValueError):
        raise ModelError(_IMPOSSIBLE, hint=_HINT) from None


def _check_channels(config: Config, channels: int | None) -> None:
    takes, gives = config.get("in_channels", 4), config.get("out_channels", 4)
    if takes != gives:
        purpose = f"one for {_PURPOSES[takes]}" if takes in _PURPOSES else "no plain one"
        what = f"this UNet takes {takes} channels and gives {gives}: it is {purpose}"
        hint = "name the UNet of a base model"
        raise ModelError(f"{what}, which cannot be trained", hint=hint)
    if channels not in (None, takes):
        what = f"this UNet takes latents of {takes} channels, and those of the VAE have {channels}"
        raise ModelError(what, hint=_TOGETHER)


def _check_text(model: Model, config: Config, sizes: Mapping[str, int | None]) -> None:
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
        raise ModelError(what, hint=_TOGETHER + further)
    if model.text_projection not in (None, "new") and len(takes) == 1:
        _check_projection(str(model.text_projection), width, *takes)
    if not xl:
        return
    own = _config(texts[-1]).get("projection_dim", 512)
    times = 6 * (config.get("addition_time_embed_dim") or 256)
    if own != (vector := config["projection_class_embeddings_input_dim"] - times):
        what = f"this UNet takes a vector of {vector} numbers a caption"
        what += f", and the last encoder of `text` makes {own}"
        raise ModelError(what, hint=_TOGETHER)


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
    near, ends = (path, path.parent), (*headers.SUFFIXES, ".index.json")
    return [file for file in files if file.parent in near and file.name.endswith(ends)]


def _encoder_of_program(weights: Weights | None, key: str, *, wan: bool) -> int | None:
    """Check an encoder; return a VAE's number of channels or an embedding's width, or None.

    With `wan`, missing tensors are found by their names, too: Latentmake knows all names of Wan's
    encoders, since it can encode with them itself.
    """
    if weights is None or weights.path is None or not (files := _files(Path(weights.path))):
        return None
    held = _held(files)
    _refuse_gaps(held)
    if wan:
        _refuse_scales(held, "read")
        try:
            lacks = _missing_of_wan(key, held, _config(weights))
        except (LookupError, TypeError, ValueError):
            raise ModelError(_IMPOSSIBLE, hint=_HINT) from None
        if fault := tensors.faults(lacks):
            raise ModelError(fault, hint=_HINT)
    if key == "vae":
        vae = headers.vae_of(held) if all(tensor.shape for tensor in held.values()) else None
        return None if vae is None else vae.channels
    return headers.embedding_width(held)


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
        number = tensors.blocks_in(names, r"(?:encoder\.)?blocks?\.(\d+)\.")
        sizes = dict.fromkeys(("d_model", "d_ff", "num_heads", "d_kv", "vocab_size"), 1)
        sized = {**sizes, "num_layers": number, "feed_forward_proj": "gated-gelu"}
        expected = [name for name, _ in tensors.t5(sized, every_bias=True)]
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
    held = _held(_files(Path(path)))
    _refuse_gaps(held)
    if not scaled:
        _refuse_scales(held, "trained")
    for key, layers in inputs.items():
        for layer, times in layers.items():
            for name, tensor in held.items():
                if name != layer and not name.endswith(f".{layer}"):
                    continue
                takes = tensor.shape[1:2] if len(tensor.shape) > 1 else tensor.shape
                size = sizes.get(key)
                if size and takes and takes != (size * times,):
                    what = f"takes {takes[0]} numbers by {name}, and `{key}` makes {size * times}"
                    raise ModelError(what, hint=_TOGETHER)


def _refuse_gaps(names: Iterable[str]) -> None:
    """Refuse a network if one block lacks a tensor that the other blocks of its stack have.

    The last block may differ, as it does in Stable Diffusion 3.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in names:
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
            raise ModelError(f"lacks {stack}.{number}.{min(lacks)}", hint=_HINT)
