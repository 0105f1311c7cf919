"""The model's section of a new configuration: its keys, from what lies on the disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentmake.config.architectures import WAN, File, Vae
from latentmake.config.fields import literal
from latentmake.config.weights import TextWeights
from latentmake.data.folders import slug
from latentmake.errors import ConfigError, ModelError
from latentmake.models.checks import fault_of
from latentmake.models.files import tokenizer_files
from latentmake.words.found import Model, Part, is_high, named_model, several

# Kind of text encoder -> the tensor of its embeddings, and the axis that tells one from another.
_EMBEDDINGS = {
    "CLIP text encoder": ("token_embedding.weight", -1),
    "T5": ("shared.weight", 0),
    "language model": ("embed_tokens.weight", -1),
}
# Their sizes there, by the encoder's name or the architecture's; of others the first counts.
_SIZES = {
    "CLIP text encoder": {"CLIP-L": 768, "OpenCLIP-H": 1024, "CLIP-G": 1280},
    "T5": {"T5": 32128, "wan": 256384},
    "language model": {
        **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_layered"), 3584),
        **{"kandinsky5": 3584, "hunyuan_image": 3584, "hunyuan_video_1_5": 3584},
        **{"hunyuan_video": 4096, "framepack": 4096, "ideogram4": 4096, "flux_2_klein_9b": 4096},
        **{"z_image": 2560, "krea2": 2560, "flux_2_klein_4b": 2560, "flux_2_dev": 5120},
        **{"anima": 1024, "lumina": 2304},
    },
}
_RENAMED = r"\bdouble_stream_modulation_img\.linear\."  # FLUX.2 as diffusers has it
_UMT5 = ("google/umt5-xxl", "umt5-xxl", ".")  # folders of its tokenizer
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "spiece.model")


@dataclass
class Section:
    """Keys of a model, as `init` writes them.

    Attributes:
        model: the model.
        kind: of the trainer.
        folder: place of what is missing.
        place: writes a path as the configuration has it.
        keys: key -> value, in order.
        missing: keys whose files are not there.
        network: that is trained.
        choices: a line for each key whose file is one of several that fit.
    """

    model: Model
    kind: str
    folder: Path
    place: Callable[[Path], Any] = literal
    keys: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    network: Part | None = None
    choices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The model's name in the configuration, that of its file or folder."""
        return slug(self.model.name)

    def value(self, key: str, path: Path | None, name: str) -> Any:
        """Return the value of a key; a missing file or folder is expected under a name."""
        if path is not None:
            return self.place(path)
        self.missing.append(key)
        return literal(self.folder / name)


def section_at(given: str) -> Section:
    """Return the section, without keys, of a model's place or hub's id; raises ModelError."""
    model, place = named_model(given)
    is_here = place is literal  # and not in the hub's cache
    beside = model.root if is_here else Path("models") / model.architecture.name
    return Section(model, "", beside, place)


def trainer_of(model: Model, asked: str | None, *, musubi: bool) -> str:
    """Return the trainer that is asked for, else the best one; `musubi`: that one is installed.

    Raises:
        ConfigError: the trainer cannot train the model; names those that can.
    """
    row, task = model.architecture, str(model.task)
    kinds = (
        ["sd", "sdscripts"] if row.checkpoints else ["sdscripts" if row.strategies else "musubi"]
    )
    if row is WAN:
        ours = not task.startswith("flf2v") and not task.endswith("-FC")
        original = any(each.has(WAN.scripts.mark) for each in model.networks if WAN.scripts)
        kinds = ["musubi"] * original + ["wan"] * ours
        if not musubi and "14B" not in task:
            kinds.reverse()
    if asked and asked not in kinds:
        hint = f"use --trainer {' or '.join(kinds)}"
        raise ConfigError(f"cannot train {model.title}", where=f"--trainer {asked}", hint=hint)
    return asked or kinds[0]


def section_of(section: Section) -> Section:
    """Fill in the keys of a model; raises ModelError."""
    model, kind, keys = section.model, section.kind, section.keys
    row, networks = model.architecture, _usable(model, kind)
    if not networks and model.networks:
        what = f"the trainer {kind} cannot read this network of {model.title}"
        hint = "name the original release's file, or a complete checkpoint"
        raise ModelError(what, where=model.networks[0].path, hint=hint)
    if row is not WAN and len({each.path.is_file() for each in networks}) == 1 < len(networks):
        raise several((str(each.path.relative_to(model.root)) for each in networks), model.root)
    low = [each for each in networks if not is_high(each)]
    high = [each for each in networks if is_high(each)]
    network = section.network = next(iter((*low, *high)), None)
    complete = network is not None and network.complete
    is_generic = row.encodes and kind == "sd" and len(row.text_encoders) == 1
    if row is not WAN and (complete or not is_generic):
        keys["architecture"] = row.name
    if model.task is not None:
        keys["task"] = model.task
    if row.encodes and kind == "sdscripts":
        keys["layout"] = kind
    for file, name, pattern in () if complete else _encoders(model):
        _put(section, file, name, pattern)
    key = "checkpoint" if complete or kind == "sdscripts" else "unet" if kind == "sd" else "dit"
    if low or not high or kind == "musubi":
        keys[key] = section.value(key, _trained(section, low[0]) if low else None, key)
    if high:
        keys["dit_high_noise"] = section.place(_trained(section, high[0]))
    return section


def _usable(model: Model, kind: str) -> list[Part]:
    """Return the networks that a trainer reads, the best first."""
    row, found = model.architecture, model.networks
    if kind == "sd":
        folders = [x for x in found if x.path.is_dir() and x.has(r"^down_blocks\.")]
        return folders or [x for x in found if x.complete]
    if kind == "wan":
        return [x for x in found if x.file.suffix == ".safetensors"]
    if row.scripts is not None:
        return [x for x in found if x.has(row.scripts.mark) and not x.has(_RENAMED)]
    files = [x for x in found if row.strategies and x.has(_any(row.strategies.marks))]
    pipeline = (model.root / "model_index.json").is_file() and not row.single_file
    return files or [x for x in found if pipeline and x.path.parent == model.root]


def _trained(section: Section, network: Part) -> Path:
    """Return the place of a network as its trainer takes it."""
    if section.kind == "sdscripts" and not section.model.architecture.single_file:
        return network.path if network.path.is_file() else section.model.root
    return network.path if section.kind in ("sd", "wan") else network.file


def _encoders(model: Model) -> Iterator[tuple[File, str, str]]:
    """Yield the encoders of a model, each with its name in `_SIZES` and a pattern of tensors."""
    row, strategies = model.architecture, model.architecture.strategies
    if row.scripts is not None:
        files = (*row.scripts.latents.files, *row.scripts.text.files)
        for file in {each.key: each for each in files}.values():
            if file.required or file.key in model.version.needs:
                kind = f"Wan {file.kind}" if row is WAN and file.kind == "VAE" else file.kind
                yield file._replace(kind=kind), row.name, ""
    elif strategies is not None and not row.encodes:
        encoders = [each for each in (strategies.latents, strategies.text) if each]
        for network in (x for each in encoders for x in each.networks):
            yield File("", network.key), row.name, _any(network.marks)
    elif strategies is not None:
        vae = Vae(2, 16 if row.single_file else 4)
        original = r"^encoder\.down\.0\." if strategies.insists else ""
        yield File("", "vae", kind="VAE", vae=vae), "", original
        for number, name in enumerate(row.text_encoders):
            kind = "T5" if name == "T5" else "CLIP text encoder"
            yield File("", f"text.{number}" if number else "text", kind=kind), name, ""


def _any(marks: Iterable[str]) -> str:
    return "|".join(map(re.escape, marks))


def _put(section: Section, file: File, name: str, pattern: str) -> None:
    row, model = section.model.architecture, section.model
    whole = row.strategies is not None and row.strategies.insists  # reads no folders, no shards
    takes_folder = file.form == "folder" or (row.encodes and not whole)
    fitting = [
        each
        for each in (model.parts if file.kind == "VAE" else model.others)
        if each.has(pattern) and _fits(file, name, each)
        if not (whole and "-of-" in each.file.name)
    ]
    key, _, number = file.key.partition(".")
    folder = key
    if key == "text":
        folder = f"text_encoder_{int(number) + 1}" if number else "text_encoder"
        fitting.sort(key=lambda each: each.path.name != folder)
    own = section.network.path.parent if section.network else model.root
    fitting.sort(key=lambda each: each.path.parent != own)  # of its own pipeline
    found = next(iter(fitting), None)
    if found is not None and len(fitting) > 1 and found.path.parent != own:
        others = ", ".join(str(each.path) for each in fitting[1:])
        section.choices.append(f"`{file.key}` is {found.path}; {others} would fit, too")
    path = found and (found.path if takes_folder else found.file)
    value = section.value(file.key, path, folder)
    if key != "text":
        section.keys[key] = value
        return
    if row.encodes and path is not None and path.is_file():
        value = _with_tokenizer(section, path, value, folder)
    section.keys.setdefault(key, []).append(value)


def _fits(file: File, name: str, part: Part) -> bool:
    """Whether a network is an encoder, as far as kind and shapes tell."""
    if file.form == "folder" and not part.path.is_dir():
        return False
    if (file.kind and not part.kinds) or fault_of(file, part.tensors):
        return False
    kind = file.kind or "language model"
    if kind not in _SIZES:
        return True
    (ending, axis), sizes = _EMBEDDINGS[kind], _SIZES[kind]
    shape, first = part.shape(ending), next(iter(sizes.values()))
    return not shape or shape[axis] == sizes.get(name, first) or shape[axis] not in sizes.values()


def _with_tokenizer(section: Section, path: Path, value: Any, folder: str) -> Any:
    """Return the value of a text encoder's file with its configuration and its tokenizer.

    A file that has both beside it, as in a folder of transformers, needs neither.
    """
    root, is_wan = section.model.root, section.model.architecture is WAN
    told = {"path": value} if isinstance(value, str) else {**value}
    tokenizer = folder.replace("text_encoder", "tokenizer")
    places = [root / tokenizer]
    if is_wan:
        places = [*(root / each for each in _UMT5), *places]
    else:
        with suppress(ModelError):
            beside = tokenizer_files(TextWeights(path=literal(path)))
            if beside and path.with_name("config.json").is_file():
                return value
        there = (root / folder / "config.json").is_file()  # only a path will do
        config = literal(root / folder)
        told["config"] = config if there else section.value("text.config", None, folder)
    found = (each for each in places if any((each / name).is_file() for name in _TOKENIZER))
    told["tokenizer"] = section.value("text.tokenizer", next(found, None), tokenizer)
    return told
