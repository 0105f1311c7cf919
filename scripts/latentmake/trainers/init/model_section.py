"""Section of a model in a new configuration: its keys, from the files on the disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from latentmake.base.errors import ConfigError, ModelError
from latentmake.config.architectures import ARCHITECTURES, ROWS, TEXT_ENCODERS
from latentmake.config.fields import literal
from latentmake.config.makers import File, Vae
from latentmake.config.weights import TextWeights
from latentmake.models.files import tokenizer_files
from latentmake.models.inspection import fault_of
from latentmake.trainers.init.local_models import Model, Part, is_high, several

# Kind of text encoder -> end of the name of its embeddings, and the axis that identifies it.
_EMBEDDINGS = {
    "CLIP text encoder": ("token_embedding.weight", -1),
    "T5": ("shared.weight", 0),
    "language model": ("embed_tokens.weight", -1),
}
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "spiece.model")


def trainer_of(model: Model, requested: str | None, *, musubi: bool) -> str:
    """Return the requested trainer, or the best one if none is requested.

    Args:
        model: model to train.
        requested: kind of the trainer; None for the best.
        musubi: whether musubi-tuner is installed.

    Raises:
        ConfigError: The trainer cannot train the model. The hint names the trainers that can.
    """
    row, version = model.architecture, model.version
    kinds = ["musubi" if row.has_tasks else "sdscripts"]
    if row.checkpoints and row.trainer:
        kinds.insert(0, row.trainer)
    elif row.has_tasks and row.trainer:
        if not any(network.has(row.pattern) for network in model.networks):
            kinds.clear()  # musubi-tuner reads the names of the original release
        if version.ours:
            kinds.append(row.trainer)
        if version.small and not musubi:
            kinds.reverse()
    if requested and requested not in kinds:
        hint = f"use --trainer {' or '.join(kinds)}"
        raise ConfigError(f"cannot train {model.title}", where=f"--trainer {requested}", hint=hint)
    return requested or kinds[0]


def fill_in(model: Model, kind: str) -> None:
    """Fill in the section of a model for a kind of trainer; raises ModelError."""
    model.kind, keys = kind, model.keys
    row, networks = model.architecture, _usable(model, kind)
    if not networks and model.networks:
        what = f"the trainer {kind} cannot read this network of {model.title}"
        hint = "name the original release's file, or a complete checkpoint"
        raise ModelError(what, where=model.networks[0].path, hint=hint)
    are_files = {network.path.is_file() for network in networks}
    if not row.pairs and len(are_files) == 1 < len(networks):
        names = (str(network.path.relative_to(model.root)) for network in networks)
        raise several(names, model.root)
    low = [network for network in networks if not is_high(network)]
    high = [network for network in networks if is_high(network)]
    network = model.network = next(iter((*low, *high)), None)
    complete = network is not None and network.complete
    is_generic = row.encodes and kind == "sd" and len(row.text_encoders) == 1
    if row.name in ARCHITECTURES and (complete or not is_generic):
        keys["architecture"] = row.name
    if model.task is not None:
        keys["task"] = model.task
    if row.encodes and kind == "sdscripts":
        keys["layout"] = kind
    for file, name, pattern in () if complete else _encoders(model):
        _put(model, file, name, pattern)
    key = "checkpoint" if complete or kind == "sdscripts" else "unet" if kind == "sd" else "dit"
    if low or not high or kind == "musubi":
        keys[key] = model.value(key, _trained(model, low[0]) if low else None, key)
    if high:
        keys["dit_high_noise"] = model.place(_trained(model, high[0]))


def _usable(model: Model, kind: str) -> list[Part]:
    """Return the networks that a trainer reads, the best first."""
    row, networks = model.architecture, model.networks
    if kind == "sd":
        places = (network for network in networks if network.path.is_dir())
        folders = [network for network in places if network.has(r"^down_blocks\.")]
        return folders or [network for network in networks if network.complete]
    if kind == "wan":
        return [network for network in networks if network.file.suffix == ".safetensors"]
    pattern, unread = row.pattern, row.unread
    if row.has_tasks:
        return [network for network in networks if network.has(pattern) and not network.has(unread)]
    if files := [network for network in networks if network.has(pattern)]:
        return files
    if row.single_file or not (model.root / "model_index.json").is_file():
        return []
    return [network for network in networks if network.path.parent == model.root]


def _trained(model: Model, network: Part) -> Path:
    """Return the path of a network that its trainer expects: a file, its folder or the model's."""
    if model.kind == "sdscripts" and not model.architecture.single_file:
        return network.path if network.path.is_file() else model.root
    return network.path if model.kind in ("sd", "wan") else network.file


def _encoders(model: Model) -> Iterator[tuple[File, str, str]]:
    """Yield the encoders of a model: file, name in `TEXT_ENCODERS`, and pattern of tensor names."""
    row = model.architecture
    if row.has_tasks:
        files = (*row.encoder_files("latents"), *row.encoder_files("text"))
        for file in {file.key: file for file in files}.values():
            if file.required or file.key in model.version.needs:
                yield file, "".join(row.text_encoders), ""
    elif not row.encodes:
        for encoder in filter(None, (row.encoder("latents"), row.encoder("text"))):
            for network in encoder.networks:
                yield File("", network.key), "", "|".join(map(re.escape, network.marks))
    else:
        original = r"^encoder\.down\.0\." if row.insists else ""
        yield File("", "vae", kind="VAE", vae=Vae(2, row.channels)), "", original
        for number, name in enumerate(row.text_encoders):
            kind, _ = TEXT_ENCODERS[name]
            yield File("", f"text.{number}" if number else "text", kind=kind), name, ""


def _put(model: Model, file: File, name: str, pattern: str) -> None:
    """Choose the file of an encoder and add its key to the section."""
    row = model.architecture
    # Some encoders of sd-scripts read neither folders nor shards.
    one_file = row.insists
    takes_folder = file.form == "folder" or (row.encodes and not one_file)
    sizes = _sizes(model, file, name)
    fitting = [
        part
        for part in (model.parts if file.kind == "VAE" else model.others)
        if part.has(pattern) and _fits(file, sizes, part)
        if not (one_file and "-of-" in part.file.name)
    ]
    key, _, number = file.key.partition(".")
    folder = key
    if key == "text":
        folder = f"text_encoder_{int(number) + 1}" if number else "text_encoder"
        fitting.sort(key=lambda part: part.path.name != folder)
    own = model.network.path.parent if model.network else model.root
    fitting.sort(key=lambda part: part.path.parent != own)  # the network's own pipeline first
    chosen = next(iter(fitting), None)
    if chosen is not None and len(fitting) > 1 and chosen.path.parent != own:
        others = ", ".join(str(part.path) for part in fitting[1:])
        model.choices.append(f"`{file.key}` is {chosen.path}; {others} would fit, too")
    path = chosen and (chosen.path if takes_folder else chosen.file)
    value = model.value(file.key, path, folder)
    if key != "text":
        model.keys[key] = value
        return
    if row.encodes and path is not None and path.is_file():
        value = _with_tokenizer(model, path, value, folder)
    model.keys.setdefault(key, []).append(value)


def _sizes(model: Model, file: File, name: str) -> list[int]:
    """Return the published sizes of encoders of a kind, that of the model's own encoder first."""
    kind = file.kind or "language model"
    if kind == "language model":
        own = model.architecture.init.language_model
        return [own, *(row.init.language_model for row in ROWS.values())]
    sizes = {name: size for name, (other, size) in TEXT_ENCODERS.items() if other == kind}
    return [*([sizes[name]] if name in sizes else []), *sizes.values()]


def _fits(file: File, sizes: list[int], part: Part) -> bool:
    """Return whether a network may be an encoder, judged by its kind and shapes."""
    if file.form == "folder" and not part.path.is_dir():
        return False
    if (file.kind and not part.kinds) or fault_of(file, part.tensors):
        return False
    if not sizes:
        return True
    ending, axis = _EMBEDDINGS[file.kind or "language model"]
    shape = part.shape(f"{re.escape(ending)}$")
    return not shape or shape[axis] == sizes[0] or shape[axis] not in sizes


def _with_tokenizer(model: Model, path: Path, value: Any, folder: str) -> Any:
    """Return the value of a text encoder's file, with keys for its configuration and tokenizer.

    If both lie beside the file, as in a folder of transformers, the value stays as it is.
    """
    root, row = model.root, model.architecture
    keys = {"path": value} if isinstance(value, str) else {**value}
    tokenizer = folder.replace("text_encoder", "tokenizer")
    places = [root / name for name in (*row.init.tokenizers, tokenizer)]
    if not row.original_files:
        with suppress(ModelError):
            beside = tokenizer_files(TextWeights(path=literal(path)))
            if beside and path.with_name("config.json").is_file():
                return value
        # `config` is a path, also for a model of the hub.
        if (root / folder / "config.json").is_file():
            keys["config"] = literal(root / folder)
        else:
            keys["config"] = model.value("text.config", None, folder)
    existing = (place for place in places if any((place / name).is_file() for name in _TOKENIZER))
    keys["tokenizer"] = model.value("text.tokenizer", next(existing, None), tokenizer)
    return keys
