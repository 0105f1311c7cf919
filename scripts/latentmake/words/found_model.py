"""A model on a disk, as `latentmake init` recognises it: by the names and shapes of its tensors.

Headers tell each network, so nothing is loaded, and names of files hardly count: they choose
between models of the same network, such as Qwen-Image and Qwen-Image-Edit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.errors import ModelError
from latentmake.files.safetensors import Tensor
from latentmake.models.headers import LORA, SUFFIXES, kinds_of, one, tensors_of

_DEPTH, _MOST = 3, 400  # folders below the one that is named, and files of weights in them
_LIBRARIES = ("diffusion_pytorch_model", "model", "pytorch_model")
_LIBRARY = re.compile(rf"({'|'.join(_LIBRARIES)})[.-]")
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
_PAIRS = ("transformer", "transformer_2", "high_noise_model", "low_noise_model")
_SHARED = ("diffusion_models", "unet", "checkpoints")

# Architecture, a name of one of its network's tensors, and a word of the path that tells it from
# another of the same network. The first that fits counts.
_NETWORKS: tuple[tuple[str, str, str], ...] = (
    ("sdxl", r"^conditioner\.embedders\.1\.|\b(label_emb\.0|add_embedding)\.", ""),
    ("sd2", r"^cond_stage_model\.model\.", ""),
    ("sd1", r"^cond_stage_model\.|\b(input_blocks|down_blocks)\.\d\..*attn2\.", ""),
    ("framepack", r"\bclean_x_embedder\.", ""),
    ("hunyuan_video_1_5", r"\bcond_type_embedding\.", ""),
    ("hunyuan_image", r"\bbyt5_in\.", ""),
    ("kandinsky5", r"\bvisual_transformer_blocks\.0\.", ""),
    ("krea2", r"\btxtfusion\.", ""),
    ("ideogram4", r"\bllm_cond_proj\.", ""),
    ("hidream_o1", r"\bfinal_layer2\.", ""),
    ("anima", r"\bllm_adapter\.", ""),
    ("qwen_image_layered", r"\btransformer_blocks\.0\.img_mod\.", "layered"),
    ("qwen_image_edit", r"\btransformer_blocks\.0\.img_mod\.", "edit"),
    ("qwen_image", r"\btransformer_blocks\.0\.img_mod\.", ""),
    ("z_image", r"(^|\.)(x_pad_token|cap_pad_token|all_x_embedder)\b", ""),
    ("lumina", r"\bcap_embedder\.", ""),
    ("flux_2_klein_4b", r"\bdouble_stream_modulation_img\.", "4b"),
    ("flux_2_klein_9b", r"\bdouble_stream_modulation_img\.", "9b"),
    ("flux_2_dev", r"\bdouble_stream_modulation_img\.", ""),
    ("hunyuan_video", r"\bsingle_blocks\.0\.modulation\.linear\.|embedder\.token_refiner\.", ""),
    ("flux_kontext", r"\b(double_blocks\.0\.img_mod\.lin|single_transformer_blocks)\.", "kontext"),
    ("flux", r"\b(double_blocks\.0\.img_mod\.lin|single_transformer_blocks)\.", ""),
    ("sd3", r"\bjoint_blocks\.0\.|\btransformer_blocks\.0\.(norm1_context|ff_context)\.", ""),
    ("wan", r"\bblocks\.0\.(cross_attn\.k|attn2\.to_k)\.", ""),
)
_FLUX_2 = {6144: "flux_2_dev", 3072: "flux_2_klein_4b", 4096: "flux_2_klein_9b"}  # by width
_KNOWN = "Stable Diffusion, SDXL, SD 3, Flux, Wan, Qwen-Image, Z-Image and others"


@dataclass(frozen=True)
class Part:
    """A network on a disk: a file, or the folder of a diffusers or transformers network.

    Attributes:
        path: of the file, the first of its shards, or the folder.
        tensors: by name; of a torch file without shapes.
    """

    path: Path
    tensors: Mapping[str, Tensor]

    @cached_property
    def _names(self) -> str:
        return "\n".join(self.tensors)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Kinds of network that it may be, see `models.kinds`."""
        return kinds_of(self.tensors)

    def has(self, pattern: str) -> bool:
        """Whether a tensor has such a name."""
        return re.search(pattern, self._names, re.MULTILINE) is not None

    def shape(self, ending: str) -> tuple[int, ...]:
        """Return the shape of the first tensor whose name ends so; () where there is none."""
        return next((x.shape for name, x in self.tensors.items() if name.endswith(ending)), ())

    @property
    def complete(self) -> bool:
        """Whether it is a file with VAE, text encoders and network of Stable Diffusion."""
        return self.has(r"^first_stage_model\.") and self.has(r"^(cond_stage_model|conditioner)\.")

    @property
    def file(self) -> Path:
        """The file, or the first of the folder's files of weights."""
        return self.path if self.path.is_file() else _weights(self.path)[0]


class Model(NamedTuple):
    """A model on a disk.

    Attributes:
        architecture: facts about it.
        task: as the configuration has it; None where the architecture has none.
        networks: that may be trained; all of Wan's are of one task.
        parts: all networks on the disk.
        root: the folder that was looked at.
    """

    architecture: Architecture
    task: str | None
    networks: list[Part]
    parts: list[Part]
    root: Path

    @property
    def title(self) -> str:
        """Its architecture as people call it."""
        known = self.architecture.scripts or self.architecture.strategies
        assert known is not None
        return f"{known.title} {self.task}" if self.task else known.title

    @property
    def others(self) -> list[Part]:
        """The networks that are not trained."""
        return [each for each in self.parts if each not in self.networks]


def found_model(place: Path, label: str = "") -> Model:
    """Return the model in a file or folder.

    Args:
        place: a file of the network, beside or above the folders of its encoders; a pipeline's
            folder; or a folder with all files of a model.
        label: words about it besides those of its path.

    Raises:
        ModelError: nothing is there, no network that is known, or those of several models.
    """
    if not place.exists():
        raise ModelError("this model does not exist", where=place, hint="correct its path")
    if _LIBRARY.match(place.name) and (place.parent / "config.json").is_file():
        place = place.parent  # a file of a folder stands for all of it
    if place.is_dir() and place.name in _PAIRS:  # a pipeline, or Wan's original release
        place = place.parent
    root = place if place.is_dir() else place.parent
    if root.name in (*_SHARED, *_PAIRS):  # ComfyUI's `models`
        root = root.parent
    own = [_of_file(place)] if place.is_file() else []
    parts = list(own)
    if not (own and own[0].complete):
        parts += [x for x in _parts(root) if not own or x.path != place]
    named = own or [x for x in parts if x.path.is_relative_to(place)]
    networks: dict[str, list[Part]] = {}
    for each in named:
        words = f"{label} {place.absolute().name} {each.path.name}".lower()
        if name := _name_of(each, words):
            networks.setdefault(name, []).append(each)
    hint = "name the file or folder of one of them"
    if len(networks) > 1:
        files = ", ".join(f"{found[0].path.name} is {name}" for name, found in networks.items())
        raise ModelError(f"holds several models ({files})", where=place, hint=hint)
    if not networks:
        kinds = [kind for each in named for kind in each.kinds.values()]
        what = f"is {one(kinds[0])}, not a model" if kinds and len(named) == 1 else "holds no model"
        raise ModelError(what, where=place, hint=f"name the file or folder of one: {_KNOWN}")
    ((name, found),) = networks.items()
    if name == WAN.name:
        return _wan(parts, found, root, place)
    task = _task(ARCHITECTURES[name], f"{label} {place.name} {found[0].path.name}")
    return Model(ARCHITECTURES[name], task, found, parts, root)


def _name_of(part: Part, words: str) -> str | None:
    """Return the architecture of a network; None for an encoder, a LoRA and what is unknown."""
    if LORA in part.kinds:
        return None
    for name, pattern, word in _NETWORKS:
        if part.has(pattern) and word in words:
            if name == "sd1" and part.shape("attn2.to_k.weight")[-1:] == (1024,):
                return "sd2"
            if name in _FLUX_2.values():
                width = part.shape("double_stream_modulation_img.lin.weight")[-1:]
                return _FLUX_2.get(width[0], name) if width else name
            return name
    return None


def _task(architecture: Architecture, label: str) -> str | None:
    """Return the task whose words a label has, else the first that needs nothing special."""
    versions = architecture.scripts.versions if architecture.scripts else {}
    words = re.split(r"[^a-z0-9]+", label.lower())

    def rank(name: str) -> tuple[int, bool, bool, int]:
        named = sum(any(word.endswith(x) for word in words) for x in re.split("[-_]", name))
        version = versions[name]
        free = version.controls[0] == 0 and not version.needs
        return -named, named == 0 and "base" not in name, not free, len(name)

    return min(versions, key=rank) if len(versions) > 1 else None


def _wan(parts: list[Part], networks: list[Part], root: Path, place: Path) -> Model:
    """Return a Wan model: its task by the channels and the width of its network.

    Raises:
        ModelError: it is Wan 2.2's 5B model, or one of several models.
    """
    width, channels = (*networks[0].shape("patch_embedding.weight"), 5120, 16)[:2]
    if channels == 48 and width == 3072:
        what, hint = "is Wan 2.2's 5B model, which no trainer knows", "use Wan 2.1, or Wan 2.2 A14B"
        raise ModelError(what, where=place, hint=hint)
    high = [each for each in networks if is_high(each)]
    if place.is_file():  # the other one of a pair
        alike = [x for x in parts if x.has(_NETWORKS[-1][1]) and x != networks[0]]
        pair = [x for x in alike if x.path.name == _other(networks[0].path.name)]
        networks, high = [*networks, *pair], [*high, *filter(is_high, pair)]
    if len(networks) > 1 + len(high):
        names = ", ".join(each.path.name for each in networks)
        hint = "name the file of one of them"
        raise ModelError(f"holds several models ({names})", where=place, hint=hint)
    two = bool(high) or any("low_noise" in str(each.path) for each in networks)
    reads_clip = networks[0].has(r"\b(img_emb|image_embedder)\.")
    name = f"{place.name} {networks[0].path.name}".lower()
    family = "flf2v" if "flf2v" in name else "i2v" if channels == 36 or reads_clip else "t2v"
    size = "1.3B" if width == 1536 else "14B"
    if two or (family == "i2v" and channels == 36 and not reads_clip):
        size = "A14B"
    task = f"{family}-{size}{'-FC' * (channels == 48)}"
    return Model(WAN, task, networks, parts, root)


def _other(name: str) -> str:
    """Return the name of the other network of Wan 2.2's pair."""
    low, high = ("low_noise", "high_noise")
    return name.replace(low, high) if low in name else name.replace(high, low)


def is_high(part: Part) -> bool:
    """Whether it is Wan 2.2's network for high noise; see `models.files`."""
    pair = part.path.name == "transformer" and part.path.with_name("transformer_2").is_dir()
    return pair or "high_noise" in f"{part.path.parent.name}/{part.path.name}"


def _parts(root: Path) -> list[Part]:
    """Return the networks in a folder; those that cannot be read are left out."""
    found: list[Part] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        place = Path(folder)
        deep = len(place.relative_to(root).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(x for x in folders if not x.startswith("."))
        found += _in_folder(place, sorted(names))
        if len(found) > _MOST:
            break
    return found


def _in_folder(place: Path, names: list[str]) -> Iterator[Part]:
    of_library = "config.json" in names and _weights(place)
    if of_library:
        tensors = [_tensors(file) for file in _weights(place)]
        yield Part(place, {name: x for each in tensors for name, x in each.items()})
    for name in names:
        shard = _SHARD.search(Path(name).stem)
        if not name.endswith(SUFFIXES) or (shard and shard[1] != "00001"):
            continue
        if not (of_library and _LIBRARY.match(name)):
            try:
                yield _of_file(place / name)
            except ModelError:
                continue


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights of a library's folder, safetensors first."""
    for suffix in SUFFIXES:
        for stem in _LIBRARIES:
            if (single := folder / f"{stem}{suffix}").is_file():
                return [single]
            if shards := sorted(folder.glob(f"{stem}-*-of-*{suffix}")):
                return shards
    return []


def _of_file(file: Path) -> Part:
    """Return the network of a file; of the first of several shards, that of all.

    Raises:
        ModelError: it cannot be read.
    """
    shards = [file]
    if match := _SHARD.search(file.stem):
        shards = sorted(file.parent.glob(f"{file.stem[: match.start()]}-*-of-*{file.suffix}"))
    try:
        found = [tensors_of(each) for each in shards]
    except ValueError as error:
        raise ModelError(str(error), where=file, hint="name a file of weights") from None
    return Part(file, {name: x for each in found for name, x in each.items()})


def _tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        return tensors_of(file)
    except ValueError:
        return {}


def json_of(path: Path) -> dict[str, Any]:
    """Return a JSON object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
