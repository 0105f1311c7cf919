"""The model's section of a new configuration: its keys, from what lies on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentmake.config.architectures import WAN, File
from latentmake.config.weights import TextWeights
from latentmake.errors import ConfigError, ModelError
from latentmake.models.checks import fault_of
from latentmake.models.files import tokenizer_files
from latentmake.models.headers import vae_of
from latentmake.words.found import Model, Part, is_high, several

_CLIPS = {"CLIP-L": 768, "OpenCLIP-H": 1024, "CLIP-G": 1280}  # width of a token's embedding
_T5, _UMT5 = 32128, 256384  # tokens that they know
_LANGUAGE = {  # the same of the language models that encode captions
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_layered", "kandinsky5"), 3584),
    **{"hunyuan_image": 3584, "hunyuan_video_1_5": 3584, "hunyuan_video": 4096, "framepack": 4096},
    **{"z_image": 2560, "flux_2_dev": 5120, "flux_2_klein_4b": 2560, "flux_2_klein_9b": 4096},
    **{"krea2": 2560, "ideogram4": 4096, "anima": 1024, "lumina": 2304},
}
_RENAMED = r"\bdouble_stream_modulation_img\.linear\."  # FLUX.2 as diffusers has it
_TOKENIZERS = ("google/umt5-xxl", "umt5-xxl", "tokenizer", ".")


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
    """

    model: Model
    kind: str
    folder: Path
    place: Callable[[Path], Any] = str
    keys: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    network: Part | None = None

    @property
    def name(self) -> str:
        """The architecture's name."""
        return self.model.architecture.name

    def value(self, key: str, path: Path | None, folder: str = "") -> Any:
        """Return the value of a key; what is missing is expected in a folder, by default `key`."""
        if path is not None:
            return self.place(path)
        self.missing.append(key)
        return str(self.folder / (folder or key))

    def put(self, key: str, path: Path | None) -> None:
        """Set a key; `text.1` is the second text encoder."""
        value = self.value(key, path)
        if key.startswith("text"):
            self.keys.setdefault("text", []).append(value)
        else:
            self.keys[key] = value


def trainers_of(model: Model, *, musubi: bool) -> list[str]:
    """Return the trainers that can train a model, the best first.

    Args:
        model: the model.
        musubi: whether musubi-tuner is installed.
    """
    row = model.architecture
    if row is WAN:
        ours = not str(model.task).startswith("flf2v") and not str(model.task).endswith("-FC")
        original = any(each.has(WAN.scripts.mark) for each in model.networks if WAN.scripts)
        small = not musubi and "14B" not in str(model.task)
        kinds = ["wan", "musubi"] if small or not original else ["musubi", "wan"]
        return [x for x in kinds if (ours if x == "wan" else original)]
    if row.strategies is None:
        return ["musubi"]
    return ["sd", "sdscripts"] if row.checkpoints else ["sdscripts"]


def section_of(section: Section) -> Section:
    """Fill in the keys of a model.

    Raises:
        ModelError: the trainer cannot read its network.
    """
    row, kind = section.model.architecture, section.kind
    is_named = not row.encodes or kind == "sdscripts" or len(row.text_encoders) > 1
    if row is not WAN and row.name and is_named:
        section.keys["architecture"] = row.name
    if section.model.task is not None:
        section.keys["task"] = section.model.task
    networks = _usable(section.model, kind)
    files = [each for each in networks if each.path.is_file()]
    if row is not WAN and len(files) > 1 and len(files) == len(networks):
        raise several((each.path.name for each in files), section.model.root)
    section.network = next(iter(networks), None)
    if row is WAN:
        _wan(section, networks)
    elif row.encodes:
        _own(section)
    elif row.strategies is not None:
        _by_strategies(section)
    else:
        _scripted(section)
    return section


def _usable(model: Model, kind: str) -> list[Part]:
    """Return the networks that a trainer reads, the best first."""
    row, found = model.architecture, model.networks
    if kind == "sd":
        folders = [x for x in found if x.path.is_dir() and x.has(r"^down_blocks\.")]
        return folders or [x for x in found if x.complete]
    if kind == "musubi" and row.scripts is not None:
        return [x for x in found if x.has(row.scripts.mark) and not x.has(_RENAMED)]
    if kind == "wan" or row.strategies is None:
        return [x for x in found if x.file.suffix == ".safetensors"]
    marks = row.strategies.marks
    files = [x for x in found if any(mark in name for mark in marks for name in x.tensors)]
    pipeline = (model.root / "model_index.json").is_file() and not row.single_file
    return files or [x for x in found if pipeline and x.path.parent == model.root]


def _refuse_network(section: Section) -> None:
    """Refuse a network that the trainer cannot read."""
    if section.network is None and section.model.networks:
        what = f"the trainer {section.kind} cannot read this network of {section.model.title}"
        hint = "name the original release's file, or a complete checkpoint"
        raise ModelError(what, where=section.model.networks[0].path, hint=hint)


def _own(section: Section) -> None:
    """Add the keys of Stable Diffusion and Flux, whose caches our encoders make."""
    model, network = section.model, section.network
    key = "unet" if section.kind == "sd" else "checkpoint"
    _refuse_network(section)
    if section.kind == "sdscripts":
        section.keys["layout"] = "sdscripts"
    if network is not None and network.complete:
        section.keys = {"architecture": section.name, **section.keys}
        section.put("checkpoint", network.path)
        return
    channels = 16 if model.architecture.single_file else 4
    original = model.architecture.strategies is not None and model.architecture.strategies.insists
    section.put("vae", next(_vaes(model, channels, original=original), None))
    for number, name in enumerate(model.architecture.text_encoders):
        _text(section, name, number, single=original)
    path = None if network is None else network.path
    if network is not None and key == "checkpoint":
        path = network.path if network.path.is_file() else model.root
        path = network.file if model.architecture.single_file else path
    section.put(key, path)


def _vaes(model: Model, channels: int, *, original: bool) -> Iterator[Path]:
    """Yield VAEs of pictures; `original`: files in the names of Flux's own release."""
    for each in model.parts:
        vae = vae_of(each.tensors) if "VAE" in each.kinds else None
        fits = vae is not None and (vae.axes, vae.channels) == (2, channels)
        if original and fits and each.has(r"^encoder\.down\.0\."):
            yield each.file
        elif not original and (fits or each.path == model.root / "vae"):
            yield each.path


def _text(section: Section, name: str, number: int, *, single: bool) -> None:
    """Add a text encoder of Stable Diffusion or Flux: a folder, or a file with its configuration.

    Args:
        section: the model's.
        name: CLIP-L, OpenCLIP-H, CLIP-G or T5.
        number: its place among the text encoders.
        single: whether the trainer reads one file of it.
    """
    root, suffix = section.model.root, f"_{number + 1}" if number else ""
    folder = f"text_encoder{suffix}"
    part = next(_texts(section.model, name, folder, single=single), None)
    path = None if part is None else part.file if single else part.path
    value = section.value(f"text.{number}" if number else "text", path, folder)
    if path is not None and path.is_file() and not _has_tokenizer(path):
        value = {"path": value} if isinstance(value, str) else {**value}
        if (root / folder / "config.json").is_file():
            value["config"] = str(root / folder)  # only a path will do
        else:
            value["config"] = section.value("text.config", None, folder)
        place = root / f"tokenizer{suffix}"
        there = (place / "tokenizer_config.json").is_file()
        value["tokenizer"] = section.value("text.tokenizer", place if there else None, place.name)
    section.keys.setdefault("text", []).append(value)


def _texts(model: Model, name: str, folder: str, *, single: bool) -> Iterator[Part]:
    kind = "T5" if name.endswith("T5") else "CLIP text encoder"
    for each in model.others:
        if kind not in each.kinds or each.file.suffix != ".safetensors":
            continue
        if single and "-of-" in each.file.name:
            continue
        width = each.shape("token_embedding.weight")[-1:]
        tokens = each.shape("shared.weight")[:1]
        fits = tokens != (_UMT5,) if kind == "T5" else width == (_CLIPS[name],)
        if each.path.name == folder or (fits and not each.path.name.startswith("text_encoder")):
            yield each


def _has_tokenizer(path: Path) -> bool:
    try:
        return bool(tokenizer_files(TextWeights(path=str(path)))) and (
            path.with_name("config.json").is_file()
        )
    except ModelError:
        return False


def _wan(section: Section, networks: list[Part]) -> None:
    """Add the keys of a Wan model."""
    model = section.model
    if not networks:
        what = "is in diffusers' names, which musubi-tuner cannot read"
        hint = "name the original release's file, or use --trainer wan"
        raise ModelError(what, where=model.networks[0].path, hint=hint)

    def first(kind: str) -> Path | None:
        found = (x for x in model.others if kind in x.kinds.values())
        return next((x.path for x in found if x.shape("shared.weight")[:1] != (_T5,)), None)

    section.put("vae", first("Wan VAE"))
    text = first("T5")
    value = section.value("text", text)
    if text is not None and text.is_file():
        known = ("tokenizer.json", "spiece.model")
        places = (model.root / each for each in _TOKENIZERS)
        found = (x for x in places if any((x / name).is_file() for name in known))
        value = {"path": value} if isinstance(value, str) else {**value}
        value["tokenizer"] = section.value("text.tokenizer", next(found, None), "tokenizer")
    section.keys["text"] = value
    if model.version is not None and "clip" in model.version.needs:
        section.put("clip", first("image encoder"))
    low = [each for each in networks if not is_high(each)]
    high = [each for each in networks if is_high(each)]
    musubi = section.kind == "musubi"
    section.network = (low or high)[0]
    if low or musubi:
        section.put("dit", (low[0].file if musubi else low[0].path) if low else None)
    if high:
        section.put("dit_high_noise", high[0].file if musubi else high[0].path)


def _by_strategies(section: Section) -> None:
    """Add the keys of an architecture that sd-scripts' own classes encode."""
    model, strategies = section.model, section.model.architecture.strategies
    assert strategies is not None
    _refuse_network(section)
    encoders = [strategies.encoder(kind) for kind in ("latents", "text")]
    for network in (x for each in encoders if each is not None for x in each.networks):
        fitting = (
            each
            for each in model.others
            if any(mark in name for mark in network.marks for name in each.tensors)
            and not _of_another(section.name, each)
            and "-of-" not in each.file.name
        )
        found = next(fitting, None)
        section.put(network.key, found.file if found else None)
    section.put("checkpoint", section.network.file if section.network else None)


def _scripted(section: Section) -> None:
    """Add the keys of an architecture that musubi-tuner's own scripts encode."""
    model = section.model
    scripts, version = model.architecture.scripts, model.version
    assert scripts is not None and version is not None
    _refuse_network(section)
    files = (*scripts.latents.files, *scripts.text.files)
    for file in {each.key: each for each in files}.values():
        if file.required or file.key in version.needs:
            found = next((x for x in model.others if _fits(section.name, file, x)), None)
            place = "path" if file.form == "folder" else "file"
            section.put(file.key, None if found is None else getattr(found, place))
    section.put("dit", section.network.file if section.network else None)


def _fits(name: str, file: File, part: Part) -> bool:
    if file.form == "folder" and not part.path.is_dir():
        return False
    if file.kind not in part.kinds or fault_of(file, part.tensors):
        return False
    return file.kind != "language model" or not _of_another(name, part)


def _of_another(name: str, part: Part) -> bool:
    """Whether a language model is that of another architecture, by its width."""
    width = part.shape("embed_tokens.weight")[-1:]
    return width != (_LANGUAGE.get(name, 0),) and bool({*width} & {*_LANGUAGE.values()})


def refuse_trainer(kind: str, model: Model, kinds: list[str]) -> None:
    """Refuse a trainer that cannot train a model.

    Raises:
        ConfigError: names those that can.
    """
    if kind not in kinds:
        hint = f"use --trainer {' or '.join(kinds)}"
        raise ConfigError(f"cannot train {model.title}", where=f"--trainer {kind}", hint=hint)
