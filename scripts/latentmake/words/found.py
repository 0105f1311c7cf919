"""Models on a disk, as `latentmake init` finds them.

Headers tell each network, so nothing is loaded, and names of files hardly count: they choose
between models of the same network, such as Qwen-Image and Qwen-Image-Edit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.config import weights
from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture, Version
from latentmake.config.fields import literal
from latentmake.config.weights import fetching
from latentmake.errors import ModelError
from latentmake.files.safetensors import Tensor
from latentmake.models.files import STEMS, variants
from latentmake.models.headers import LORA, SUFFIXES, kinds_of, one, tensors_of
from latentmake.words.dataset_folders import Found

FIRST = Path("models/stable-diffusion-v1-5")
"""Model of a new configuration where none is named."""

_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_DEPTH = 3  # folders below the one that is named
_LIBRARY = re.compile(rf"({'|'.join(STEMS)})[.-]")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_FURTHER = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")  # shard, besides the first
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
_FLUX_2 = {6144: "flux_2_dev", 3072: "flux_2_klein_4b", 4096: "flux_2_klein_9b"}
# Architecture -> the tensor whose width, the last axis, tells that it is another one.
_WIDTHS = {
    "sd1": ("attn2.to_k.weight", {1024: "sd2"}),
    **dict.fromkeys(_FLUX_2.values(), ("double_stream_modulation_img.lin.weight", _FLUX_2)),
}
_KNOWN = "Stable Diffusion, SDXL, SD 3, Flux, Wan, Qwen-Image, Z-Image and others"


class Part(NamedTuple):
    """A network on a disk: a file, or the folder of a diffusers or transformers network.

    Attributes:
        path: of the file, or the folder.
        file: the file, the first of its shards, or that of the folder.
        tensors: by name; of a torch file without shapes.
    """

    path: Path
    file: Path
    tensors: Mapping[str, Tensor]

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of network that it may be, see `models.headers`."""
        return kinds_of(self.tensors)

    def has(self, pattern: str) -> bool:
        """Whether a tensor has such a name."""
        return any(re.search(pattern, name) for name in self.tensors)

    def shape(self, ending: str) -> tuple[int, ...]:
        """Return the shape of the first tensor whose name ends so; () where there is none."""
        return next((x.shape for name, x in self.tensors.items() if name.endswith(ending)), ())

    @property
    def complete(self) -> bool:
        """Whether it is a file with VAE, text encoders and network of Stable Diffusion."""
        return self.has(r"^first_stage_model\.") and self.has(r"^(cond_stage_model|conditioner)\.")


class Model(NamedTuple):
    """A model on a disk.

    Attributes:
        architecture: facts about it.
        task: as the configuration has it; None where the architecture has none.
        networks: that may be trained; all of Wan's are of one task.
        parts: all networks on the disk.
        root: the folder that was looked at.
        name: of its file or folder, or of the hub's model.
    """

    architecture: Architecture
    task: str | None
    networks: list[Part]
    parts: list[Part]
    root: Path
    name: str

    @property
    def title(self) -> str:
        """Its architecture as people call it."""
        known = self.architecture.scripts or self.architecture.strategies
        assert known is not None
        return f"{known.title} {self.task}" if self.task else known.title

    @property
    def version(self) -> Version:
        """The version of its architecture that its task names."""
        scripts = self.architecture.scripts
        return scripts.versions.get(self.task or "", Version()) if scripts else Version()

    def takes(self, dataset: Found) -> bool:
        """Whether it is trained on the images, or on the videos, of a dataset."""
        return self.version.videos if dataset.video else self.version.images

    @property
    def others(self) -> list[Part]:
        """The networks that are not trained."""
        return [each for each in self.parts if each not in self.networks]


def found_model(place: Path, label: str = "") -> Model:
    """Return the model in a file or folder; raises ModelError.

    Args:
        place: a file of the network, beside or above the folders of its encoders; a pipeline's
            folder; or a folder with all files of a model.
        label: words about it besides those of its path.
    """
    if not place.exists():
        hint = ", or ".join(filter(None, ("correct its path", fetching(place))))
        raise ModelError("this model does not exist", where=place, hint=hint)
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
    if len(networks) > 1:
        raise several(
            (f"{found[0].path.name} is {name}" for name, found in networks.items()), place
        )
    if not networks:
        kinds = [kind for each in named for kind in each.kinds.values()]
        what = f"is {one(kinds[0])}, not a model" if kinds and len(named) == 1 else "holds no model"
        raise ModelError(what, where=place, hint=f"name the file or folder of one: {_KNOWN}")
    ((name, found),) = networks.items()
    title = label.rpartition("/")[2] or _title(place)
    if name == WAN.name:
        return _wan(parts, found, root, place)._replace(name=title)
    task = _task(ARCHITECTURES[name], f"{label} {place.name} {found[0].path.name}")
    return Model(ARCHITECTURES[name], task, found, parts, root, title)


def _title(place: Path) -> str:
    """Return the name of a model's file or folder, or of the folder above a general one."""
    name = place.stem if place.is_file() else place.absolute().name
    general = name in (*_SHARED, *_PAIRS) or _LIBRARY.match(f"{name}.")
    return place.absolute().parent.name if general else name


def named_model(given: str | None) -> tuple[Model, Callable[[Path], Any]]:
    """Return the model of a place or hub's id, and what writes its paths; raises ModelError."""
    if given is None:
        if FIRST.is_dir():
            return found_model(FIRST), literal
        return Model(ARCHITECTURES["sd1"], None, [], [], FIRST, FIRST.name), literal
    if Path(given).exists() or not _HUB.fullmatch(given):
        return found_model(Path(given)), literal
    commit = weights.known_commit(given)
    if commit is None:
        hint = f"correct the path, or run `hf download {given}` for a model of the hub"
        raise ModelError("this model does not exist here", where=given, hint=hint)
    snapshot = weights.place_of(given, commit)

    def place(path: Path) -> dict[str, str]:
        below = {"subfolder" if path.is_dir() else "file": str(path.relative_to(snapshot))}
        return {"hub": given, "revision": commit, **({} if path == snapshot else below)}

    return found_model(snapshot, given), place


def several(names: Iterable[str], place: Path) -> ModelError:
    """Return the error of a place with more than one model."""
    hint = "name the file or folder of one of them"
    return ModelError(f"holds several models ({', '.join(names)})", where=place, hint=hint)


def _name_of(part: Part, words: str) -> str | None:
    """Return the architecture of a network; None for an encoder, a LoRA and what is unknown."""
    if LORA in part.kinds:
        return None
    for name, pattern, word in _NETWORKS:
        if part.has(pattern) and word in words:
            ending, widths = _WIDTHS.get(name, ("", {}))
            return next((widths[x] for x in part.shape(ending)[-1:] if x in widths), name)
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
    """Return a Wan model, whose network's channels and width tell its task; raises ModelError."""
    width, channels = (*networks[0].shape("patch_embedding.weight"), 5120, 16)[:2]
    if channels == 48 and width == 3072:
        what, hint = "is Wan 2.2's 5B model, which no trainer knows", "use Wan 2.1, or Wan 2.2 A14B"
        raise ModelError(what, where=place, hint=hint)
    if place.is_file():  # the other one of a pair
        first = networks[0]
        pair = (x for x in parts if x != first and _noiseless(x) == _noiseless(first))
        networks = [first, *(x for x in pair if x.has(_NETWORKS[-1][1]))]
    high = [each for each in networks if is_high(each)]
    if len(networks) > 1 + len(high):
        raise several((each.path.name for each in networks), place)
    two = bool(high) or any("low_noise" in str(each.path) for each in networks)
    reads_clip = networks[0].has(r"\b(img_emb|image_embedder)\.")
    name = f"{place.name} {networks[0].path.name}".lower()
    family = "flf2v" if "flf2v" in name else "i2v" if channels == 36 or reads_clip else "t2v"
    size = "1.3B" if width == 1536 else "14B"
    if two or (family == "i2v" and channels == 36 and not reads_clip):
        size = "A14B"
    task = f"{family}-{size}{'-FC' * (channels == 48)}"
    return Model(WAN, task, networks, parts, root, root.name)


def _noiseless(part: Part) -> str:
    return re.sub("(high|low)_noise", "", part.path.name)


def is_high(part: Part) -> bool:
    """Whether it is Wan 2.2's network for high noise; see `models.files`."""
    pair = part.path.name == "transformer" and part.path.with_name("transformer_2").is_dir()
    return pair or "high_noise" in f"{part.path.parent.name}/{part.path.name}"


def _parts(root: Path) -> Iterator[Part]:
    """Yield the networks in a folder; those that cannot be read are left out."""
    for folder, folders, names in os.walk(root, followlinks=True):
        place = Path(folder)
        deep = len(place.relative_to(root).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(x for x in folders if not x.startswith("."))
        files = [place / name for name in sorted(names) if name.endswith(SUFFIXES)]
        files = [each for each in files if not _FURTHER.search(each.stem)]
        own: list[Path] = []
        if "config.json" in names:  # a library's folder: its safetensors come first
            for variant in ("", *variants(place)):
                named = [f"{stem}{variant}" for stem in STEMS]
                own = own or [x for x in files if _SHARD.sub("", x.stem) in named]
            own.sort(key=lambda x: SUFFIXES.index(x.suffix))
        for file in (*own[:1], *(x for x in files if not (own and _LIBRARY.match(x.name)))):
            with suppress(ModelError):
                part = _of_file(file)
                yield part._replace(path=place) if file in own else part


def _of_file(file: Path) -> Part:
    """Return the network of a file, or of all shards of its first; raises ModelError."""
    shards = [file]
    if match := _SHARD.search(file.stem):
        shards = sorted(file.parent.glob(f"{file.stem[: match.start()]}-*-of-*{file.suffix}"))
    try:
        found = [tensors_of(each) for each in shards]
    except ValueError as error:
        raise ModelError(str(error), where=file, hint="name a file of weights") from None
    return Part(file, file, {name: x for each in found for name, x in each.items()})
