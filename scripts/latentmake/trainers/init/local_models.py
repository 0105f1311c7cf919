"""Models on this disk, as `latentmake init` recognises them.

The headers of weights files identify the networks, so no tensors are loaded. File names only
distinguish models with the same network, such as Qwen-Image and Qwen-Image-Edit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.base.errors import ModelError
from latentmake.config import weights
from latentmake.config.architectures import ROWS
from latentmake.config.fields import literal
from latentmake.config.makers import Architecture, Version
from latentmake.config.weights import fetching
from latentmake.data.folders import slug
from latentmake.formats.safetensors import Tensor
from latentmake.models.files import STEMS, variants
from latentmake.models.headers import LORA, SUFFIXES, kinds_of, one, tensors_of
from latentmake.trainers.init.dataset_folders import FoundDataset

_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_DEPTH = 3  # levels of folders that are searched below the given folder
_LIBRARY = re.compile(rf"({'|'.join(STEMS)})[.-]")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_FURTHER = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")  # all shards except the first
_PAIRS = ("transformer", "transformer_2", "high_noise_model", "low_noise_model")
_SHARED = ("diffusion_models", "unet", "checkpoints")
_RECOGNISED = sorted(ROWS.values(), key=lambda row: row.init.order)
# Model of a new configuration if the user names none, and its folder.
_FIRST = next(row for row in ROWS.values() if row.init.download)
_PLACE = Path("models", _FIRST.init.download.split()[0].rpartition("/")[2])
DOWNLOAD = f"hf download {_FIRST.init.download} --local-dir {_PLACE}"
"""Command that downloads this model."""
_KNOWN = "Stable Diffusion, SDXL, SD 3, Flux, Wan, Qwen-Image, Z-Image and others"


class Part(NamedTuple):
    """Network on a disk: a file, or the folder of a diffusers or transformers network.

    Attributes:
        path: path of the file or folder.
        file: the file itself, its first shard, or the weights file of the folder.
        tensors: name -> tensor; tensors of a torch file have no shapes.
    """

    path: Path
    file: Path
    tensors: Mapping[str, Tensor]

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of network that this may be, see `models.headers.kinds_of`."""
        return kinds_of(self.tensors)

    def has(self, pattern: str) -> bool:
        """Whether the name of a tensor matches a pattern."""
        return any(re.search(pattern, name) for name in self.tensors)

    def shape(self, pattern: str) -> tuple[int, ...]:
        """Return the shape of the first tensor whose name matches a pattern, or ()."""
        tensors = self.tensors.items()
        return next((tensor.shape for name, tensor in tensors if re.search(pattern, name)), ())

    @property
    def complete(self) -> bool:
        """Whether this is a checkpoint with VAE, text encoders and network (Stable Diffusion)."""
        return self.has(r"^first_stage_model\.") and self.has(r"^(cond_stage_model|conditioner)\.")


@dataclass
class Model:
    """Model on a disk, and its section of a configuration; `model_section` fills in the section.

    Attributes:
        architecture: architecture of the model.
        task: value of `task` in the configuration; None if the architecture has no tasks.
        networks: networks that can be trained; for Wan, all of them have one task.
        parts: all networks on the disk.
        root: the folder that was searched.
        name: name in the configuration, from the model's file or folder, or its name on the hub.
        place: function that converts a path to its value in the configuration.
        kind: kind of the trainer.
        keys: key -> value, in the order of the section.
        missing: keys whose files are missing.
        network: the network that is trained.
        choices: a line for each key for which several files fit.
    """

    architecture: Architecture
    task: str | None
    networks: list[Part]
    parts: list[Part]
    root: Path
    name: str
    place: Callable[[Path], Any] = literal
    kind: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    network: Part | None = None
    choices: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Folder of missing files: beside the model, unless the model is in the hub's cache."""
        return self.root if self.place is literal else Path("models", self.architecture.name)

    def value(self, key: str, path: Path | None, name: str) -> Any:
        """Return the value of a key; without a path, the file is missing and expected as `name`."""
        if path is not None:
            return self.place(path)
        self.missing.append(key)
        return literal(self.folder / name)

    @property
    def title(self) -> str:
        """Name of the architecture and task for people."""
        title = self.architecture.title
        return f"{title} {self.task}" if self.task else title

    @property
    def version(self) -> Version:
        """Version of the architecture for the model's task."""
        return self.architecture.version(self.task)

    def takes(self, dataset: FoundDataset) -> bool:
        """Whether the model can be trained on the images or videos of a dataset."""
        return self.version.videos if dataset.settings.video else self.version.images

    @property
    def others(self) -> list[Part]:
        """Networks that are not trained."""
        return [part for part in self.parts if part not in self.networks]


def model_at(place: Path, label: str = "") -> Model:
    """Return the model in a file or folder; raises ModelError.

    Args:
        place: file of the network, with the folders of its encoders beside or below it; folder of
            a pipeline; or folder with all files of a model.
        label: further words that describe the model, such as its ID on the hub.
    """
    if not place.exists():
        hint = ", or ".join(filter(None, ("correct its path", fetching(place))))
        raise ModelError("this model does not exist", where=place, hint=hint)
    if _LIBRARY.match(place.name) and (place.parent / "config.json").is_file():
        place = place.parent  # a weights file of a library's folder stands for the folder
    if place.is_dir() and place.name in _PAIRS:  # part of a pipeline or of Wan's original release
        place = place.parent
    root = place if place.is_dir() else place.parent
    if root.name in (*_SHARED, *_PAIRS):
        root = root.parent  # encoders lie in sibling folders, as in ComfyUI's `models`
    own = [_of_file(place)] if place.is_file() else []
    parts = list(own)
    if not (own and own[0].complete):
        parts += [part for part in _parts(root) if not own or part.path != place]
    named = own or [part for part in parts if part.path.is_relative_to(place)]
    by_architecture: dict[str, list[Part]] = {}
    for part in named:
        words = f"{label} {place.absolute().name} {part.path.name}".lower()
        if name := _name_of(part, words):
            by_architecture.setdefault(name, []).append(part)
    if len(by_architecture) > 1:
        named_first = ((name, first) for name, (first, *_) in by_architecture.items())
        raise several((f"{first.path.name} is {name}" for name, first in named_first), place)
    if not by_architecture:
        kinds = [kind for part in named for kind in part.kinds.values()]
        what = f"is {one(kinds[0])}, not a model" if kinds and len(named) == 1 else "holds no model"
        raise ModelError(what, where=place, hint=f"name the file or folder of one: {_KNOWN}")
    ((name, networks),) = by_architecture.items()
    row, first = ROWS[name], networks[0]
    fault = row.untrained
    if fault and first.shape(row.sized_by)[:2] == fault.shape:
        raise ModelError(fault.what, where=place, hint=fault.hint)
    if row.pairs:
        networks = _pair(parts, networks, place, row.init.network)
    task = _task(row, networks, f"{label} {place.name} {first.path.name}")
    title = slug(label.rpartition("/")[2] or _title(place))
    return Model(row, task, networks, parts, root, title)


def _title(place: Path) -> str:
    """Return the name of a model's file or folder; if it is a general name, the parent's name."""
    name = place.stem if place.is_file() else place.absolute().name
    general = name in (*_SHARED, *_PAIRS) or _LIBRARY.match(f"{name}.")
    return place.absolute().parent.name if general else name


def named_model(given: str | None) -> Model:
    """Return the model at a path or with a hub ID; raises ModelError."""
    if given is None and not _PLACE.is_dir():
        return Model(_FIRST, None, [], [], _PLACE, slug(_PLACE.name))
    if given is None or Path(given).exists() or not _HUB.fullmatch(given):
        return model_at(Path(given or _PLACE))
    commit = weights.known_commit(given)
    if commit is None:
        hint = f"correct the path, or run `hf download {given}` for a model of the hub"
        raise ModelError("this model does not exist here", where=given, hint=hint)
    snapshot = weights.place_of(given, commit)

    def place(path: Path) -> dict[str, str]:
        value = {"hub": given, "revision": commit}
        if path != snapshot:
            key = "subfolder" if path.is_dir() else "file"
            value[key] = str(path.relative_to(snapshot))
        return value

    model = model_at(snapshot, given)
    model.place = place
    return model


def several(names: Iterable[str], place: Path) -> ModelError:
    """Return the error for a place that contains more than one model."""
    hint = "name the file or folder of one of them"
    return ModelError(f"holds several models ({', '.join(names)})", where=place, hint=hint)


def _name_of(part: Part, words: str) -> str | None:
    """Return the architecture of a network; None for encoders, LoRAs and unknown networks."""
    if LORA in part.kinds:
        return None
    for row in _RECOGNISED:
        for pattern, size in row.init.sizes.items():
            if part.shape(pattern)[-1:] == (size,):
                return row.name
    for row in _RECOGNISED:
        if row.init.word in words and part.has(row.init.network or row.pattern):
            return row.name
    return None


def _task(row: Architecture, networks: list[Part], label: str) -> str | None:
    """Return the task of a model: that of its network's sizes, or else the one that a label names.

    If neither decides, the simplest task is returned: one that needs no control images and no
    further weights.
    """
    versions, sized_by = row.versions, row.sized_by
    if len(versions) < 2:
        return None
    usual, label = next(iter(versions.values())), label.lower()
    shape = networks[0].shape(sized_by) if sized_by else ()
    # The shapes of torch files are not known.
    width, channels = shape[:2] if len(shape) > 1 else (usual.width, usual.channels)
    if channels not in {version.channels for version in versions.values()}:
        channels = usual.channels
    reads_clip = networks[0].has(r"\b(img_emb|image_embedder)\.")
    two = any(is_high(part) or "low_noise" in str(part.path) for part in networks)
    words = re.split(r"[^a-z0-9]+", label)

    def by_sizes(version: Version) -> tuple[bool, ...]:
        return (
            version.word not in label,
            not version.word,
            ("clip" in version.needs) != reads_clip,
            version.channels != channels,
            (version.boundary is not None) != two,
            version.width != width,
        )

    def rank(name: str) -> tuple[object, ...]:
        version = versions[name]
        if version.channels:
            return (*by_sizes(version), version.controls[0] != 0, len(name))
        named = sum(any(word.endswith(part) for word in words) for part in re.split("[-_]", name))
        free = version.controls[0] == 0 and not version.needs
        return -named, named == 0 and "base" not in name, not free, len(name)

    return min(versions, key=rank)


def _pair(parts: list[Part], networks: list[Part], place: Path, pattern: str) -> list[Part]:
    """Return the networks of a model that may have two, for high and low noise.

    A file stands for both: the other file of the pair is added.

    Raises:
        ModelError: there are more networks.
    """
    first = networks[0]
    if place.is_file():
        pair = (part for part in parts if part != first and _noiseless(part) == _noiseless(first))
        networks = [first, *(part for part in pair if part.has(pattern))]
    if len(networks) > 1 + sum(map(is_high, networks)):
        raise several((network.path.name for network in networks), place)
    return networks


def _noiseless(part: Part) -> str:
    return re.sub("(high|low)_noise", "", part.path.name)


def is_high(part: Part) -> bool:
    """Whether a network is Wan 2.2's network for high noise; see `models.files`."""
    pair = part.path.name == "transformer" and part.path.with_name("transformer_2").is_dir()
    return pair or "high_noise" in f"{part.path.parent.name}/{part.path.name}"


def _parts(root: Path) -> Iterator[Part]:
    """Yield the networks in a folder; unreadable files are left out."""
    for folder, folders, names in os.walk(root, followlinks=True):
        place = Path(folder)
        deep = len(place.relative_to(root).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        files = [place / name for name in sorted(names) if name.endswith(SUFFIXES)]
        files = [file for file in files if not _FURTHER.search(file.stem)]
        own: list[Path] = []
        if "config.json" in names:  # a folder of diffusers or transformers, which is one network
            for variant in ("", *variants(place)):
                stems = [f"{stem}{variant}" for stem in STEMS]
                own = own or [file for file in files if _SHARD.sub("", file.stem) in stems]
            own.sort(key=lambda file: SUFFIXES.index(file.suffix))  # safetensors come first
        others = [file for file in files if not (own and _LIBRARY.match(file.name))]
        for file in (*own[:1], *others):
            with suppress(ModelError):
                part = _of_file(file)
                yield part._replace(path=place) if file in own else part


def _of_file(file: Path) -> Part:
    """Return the network of a file, or of all shards if it is a shard; raises ModelError."""
    shards = [file]
    if match := _SHARD.search(file.stem):
        shards = sorted(file.parent.glob(f"{file.stem[: match.start()]}-*-of-*{file.suffix}"))
    try:
        tensors = [tensors_of(shard) for shard in shards]
    except ValueError as error:
        raise ModelError(str(error), where=file, hint="name a file of weights") from None
    return Part(file, file, dict(chain.from_iterable(of_shard.items() for of_shard in tensors)))
