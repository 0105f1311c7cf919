"""A model on a disk, as `latentmake init` recognises it: by the names and shapes of its tensors.

Each network is told by its header, so that nothing is loaded and file names hardly count: they
choose between models of the same network, such as Qwen-Image and Qwen-Image-Edit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.config.scripts import File
from latentmake.errors import ModelError
from latentmake.models.encoder_files import fits, kinds_in, vae_of
from latentmake.models.weight_kinds import PICKLES, content_of
from latentmake.words.found_folders import json_of

_SUFFIXES = (".safetensors", *PICKLES)
_DEPTH, _MOST = 3, 400  # folders below the one that is named, and files of weights in them
_LIBRARIES = ("diffusion_pytorch_model", "model", "pytorch_model")
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
_CHECKPOINT = r"^model\.diffusion_model\."

# Architecture, a name of one of its network's tensors, and a word of the path that tells it from
# another of the same network. The first that fits counts.
_NETWORKS: tuple[tuple[str, str, str], ...] = (
    ("sdxl", r"^conditioner\.embedders\.1\.|\b(label_emb\.0|add_embedding)\.", ""),
    ("sd2", r"^cond_stage_model\.model\.", ""),
    ("sd1", r"^cond_stage_model\.|\b(input_blocks|down_blocks)\.\d\..*attn2\.", ""),
    ("framepack", r"\bclean_x_embedder\.", ""),
    ("hunyuan_image", r"\bbyt5_in\.", "image"),
    ("hunyuan_video_1_5", r"\bbyt5_in\.", ""),
    ("kandinsky5", r"\bvisual_transformer_blocks\.0\.", ""),
    ("krea2", r"\btxtfusion\.", ""),
    ("ideogram4", r"\bllm_cond_proj\.", ""),
    ("hidream_o1", r"\bfinal_layer2\.", ""),
    ("anima", r"\bllm_adapter\.", ""),
    ("qwen_image_layered", r"\btransformer_blocks\.0\.img_mod\.", "layered"),
    ("qwen_image_edit", r"\btransformer_blocks\.0\.img_mod\.", "edit"),
    ("qwen_image", r"\btransformer_blocks\.0\.img_mod\.", ""),
    ("z_image", r"\bnoise_refiner\.0\.", r"z[-_]?image"),
    ("z_image", r"(^|\.)(x_pad_token|cap_pad_token|all_x_embedder)\b", ""),
    ("lumina", r"\bcap_embedder\.", ""),
    ("flux_2_klein_4b", r"\bdouble_stream_modulation_img\.", "4b"),
    ("flux_2_klein_9b", r"\bdouble_stream_modulation_img\.", "9b"),
    ("flux_2_dev", r"\bdouble_stream_modulation_img\.", ""),
    ("hunyuan_video", r"\bsingle_blocks\.0\.modulation\.linear\.", ""),
    ("flux_kontext", r"\bdouble_blocks\.0\.img_mod\.lin\.", "kontext"),
    ("flux", r"\b(double_blocks\.0\.img_mod\.lin|single_transformer_blocks)\.", ""),
    ("sd3", r"\bjoint_blocks\.0\.|\btransformer_blocks\.0\.(norm1_context|ff_context)\.", ""),
    ("wan", r"\bblocks\.0\.(cross_attn\.k|attn2\.to_k)\.", ""),
)


class Part(NamedTuple):
    """A network on a disk: a file, or the folder of a diffusers or transformers network.

    Attributes:
        path: of the file or folder.
        tensors: name -> shape; () where a torch file does not say.
        config: content of the folder's config.json.
    """

    path: Path
    tensors: dict[str, tuple[int, ...]]
    config: dict[str, Any]

    def has(self, pattern: str) -> bool:
        """Whether a tensor has such a name."""
        return re.search(pattern, "\n".join(self.tensors), re.MULTILINE) is not None

    def shape(self, ending: str) -> tuple[int, ...]:
        """Return the shape of the first tensor whose name ends so; () where there is none."""
        return next((each for name, each in self.tensors.items() if name.endswith(ending)), ())

    @property
    def file(self) -> Path:
        """The file, or the folder's first file of weights, for programs that read files."""
        return self.path if self.path.is_file() else _weights(self.path)[0]


class Model(NamedTuple):
    """A model on a disk.

    Attributes:
        architecture: facts about it.
        task: as the configuration has it; None where the architecture has none, or one.
        networks: that are trained; of Wan 2.2 those for low and for high noise.
        parts: all networks on the disk.
        root: the folder that was looked at.
        complete: whether one file holds VAE, text encoders and network.
    """

    architecture: Architecture
    task: str | None
    networks: list[Part]
    parts: list[Part]
    root: Path
    complete: bool

    def vae(self, channels: int) -> Part | None:
        """Return the VAE of pictures with so many channels of latents."""
        found = [each for each in self.parts if "VAE" in kinds_in(each.tensors)]
        fitting = [each for each in found if (vae := vae_of(each.tensors)) is not None
                   and vae.axes == 2 and vae.channels == channels]  # fmt: skip
        return next(iter(fitting or [each for each in found if self.complete]), None)

    def text(self, name: str, number: int) -> Part | None:
        """Return a text encoder in a folder, or in a file of its own.

        Args:
            name: as the architecture's row has it: CLIP-L, OpenCLIP-H, CLIP-G, T5, umT5.
            number: its place among the model's text encoders.
        """
        if self.complete:
            return self.networks[0]
        kind = "T5" if name.endswith("T5") else "CLIP text encoder"
        found = [each for each in self.parts if kind in kinds_in(each.tensors)]
        folder = f"text_encoder_{number + 1}" if number else "text_encoder"
        widths = {"CLIP-L": 768, "OpenCLIP-H": 1024, "CLIP-G": 1280}
        for each in found:
            width = each.shape("token_embedding.weight")
            if each.path.name == folder or (width and width[-1] == widths.get(name)):
                return each
        return found[0] if found and kind == "T5" else None

    def file(self, file: File) -> Part | None:
        """Return the part that a script of musubi-tuner takes."""
        found = [each for each in self.parts if each not in self.networks]
        return next((each for each in found if fits(file, _described(each))), None)

    def marked(self, marks: Sequence[str]) -> Part | None:
        """Return the first part that has a tensor with one of some marks in its name."""
        found = (each for each in self.parts if each not in self.networks)
        return next((x for x in found if any(m in n for m in marks for n in x.tensors)), None)


def found_model(place: Path) -> Model:
    """Return the model in a file or folder.

    Args:
        place: a file of the network, beside or above the folders of its encoders; a pipeline's
            folder; or a folder with all files of a model.

    Raises:
        ModelError: nothing is there, or no network that is known.
    """
    if not place.exists():
        raise ModelError("this model does not exist", where=place, hint="correct its path")
    root = place if place.is_dir() else place.parent
    own = [] if place.is_dir() else [_of_file(place)]
    complete = bool(own) and own[0].has(_CHECKPOINT) and own[0].has(r"^first_stage_model\.")
    parts = own if complete else [*own, *(x for x in _parts(root) if x.path != place)]
    for each in own or parts:
        name = _name_of(each, place)
        if name is None:
            continue
        if name == WAN.name:
            return _wan(parts, each, root)
        architecture = ARCHITECTURES[name]
        return Model(architecture, _task(architecture, place), [each], parts, root, complete)
    known = "Stable Diffusion, SDXL, SD 3, Flux, Wan, Qwen-Image, Z-Image and others"
    what = "holds no network that is known" if parts else "holds no weights"
    raise ModelError(what, where=place, hint=f"name the file or folder of a model: {known}")


def _name_of(part: Part, place: Path) -> str | None:
    """Return the architecture of a network; None for an encoder, a LoRA and what is unknown."""
    if part.has(r"lora_(down|up)|lora_[AB]\."):
        return None
    words = f"{place.name}/{part.path.name}".lower()
    for name, pattern, word in _NETWORKS:
        if part.has(pattern) and re.search(word, words):
            if name == "sd1" and part.shape("attn2.to_k.weight")[-1:] == (1024,):
                return "sd2"
            return _flux_2(name, part)
    return None


def _flux_2(name: str, part: Part) -> str:
    """Tell FLUX.2's networks by their width, whatever their files are called."""
    widths = {6144: "flux_2_dev", 3072: "flux_2_klein_4b", 4096: "flux_2_klein_9b"}
    width = part.shape("double_stream_modulation_img.lin.weight")[-1:]
    return widths.get(width[0], name) if width and name in widths.values() else name


def _task(architecture: Architecture, place: Path) -> str | None:
    """Return the task whose name the path has, else the first that needs no control images."""
    versions = architecture.scripts.versions if architecture.scripts else {}
    if len(versions) < 2:
        return None
    named = [each for each in versions if each in place.name.lower().replace("_", "-")]
    free = [name for name, each in versions.items() if each.controls[0] == 0 and not each.needs]
    base = [name for name in versions if "base" in name]
    return max(named, key=len) if named else next(iter([*base, *free, *versions]))


def _wan(parts: list[Part], network: Part, root: Path) -> Model:
    """Return a Wan model: its task by the channels and the width of its network."""
    shape = network.shape("patch_embedding.weight")
    width, channels = (*shape, 5120, 16)[:2] if len(shape) == 5 else (5120, 16)
    if channels == 48 and width == 3072:
        hint = "use Wan 2.1, or the networks of Wan 2.2 A14B"
        raise ModelError(
            "is Wan 2.2's 5B model, which no trainer here trains", where=root, hint=hint
        )
    networks = [x for x in parts if x.shape("patch_embedding.weight") == shape and _is_wan(x)]
    high = [each for each in networks if _is_high(each, networks)]
    low = [each for each in networks if each not in high]
    if len(networks) > 1 and not high:
        low = [network]
    family = "i2v" if channels == 36 else "t2v"
    two = bool(high) or "low_noise" in network.path.name
    size = "1.3B" if width == 1536 else "A14B" if two else "14B"
    return Model(WAN, f"{family}-{size}", [*low[:1], *high[:1]], parts, root, False)


def _is_wan(part: Part) -> bool:
    return part.has(_NETWORKS[-1][1])


def _is_high(part: Part, networks: list[Part]) -> bool:
    """Whether it is Wan 2.2's network for high noise; see `models.wan_dit.dit_place`."""
    pair = {each.path.name for each in networks} >= {"transformer", "transformer_2"}
    return "high_noise" in str(part.path) or (pair and part.path.name == "transformer")


def _parts(root: Path) -> list[Part]:
    """Return the networks in a folder: the deepest last, those that cannot be read left out."""
    return list(_walked(root))[:_MOST]


def _walked(root: Path) -> Iterator[Part]:
    for folder, folders, names in os.walk(root):
        place = Path(folder)
        deep = len(place.relative_to(root).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(x for x in folders if not x.startswith("."))
        of_library = "config.json" in names and _weights(place)
        if of_library:
            yield _of_folder(place)
        for name in sorted(names):
            shard = _SHARD.search(Path(name).stem)
            if not name.endswith(_SUFFIXES) or (shard and shard[1] != "00001"):
                continue
            if not (of_library and name.startswith(_LIBRARIES)):
                try:
                    yield _of_file(place / name)
                except ModelError:
                    continue


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights of a library's folder, safetensors first."""
    for suffix in _SUFFIXES:
        found = [each for stem in _LIBRARIES for each in sorted(folder.glob(f"{stem}*{suffix}"))]
        if found:
            return found
    return []


def _of_folder(folder: Path) -> Part:
    tensors: dict[str, tuple[int, ...]] = {}
    for file in _weights(folder):
        tensors |= _shapes(file)
    return Part(folder, tensors, json_of(folder / "config.json"))


def _of_file(file: Path) -> Part:
    """Return the network of a file; of the first of several shards, that of all.

    Raises:
        ModelError: it cannot be read.
    """
    shards = [file]
    if match := _SHARD.search(file.stem):
        shards = sorted(file.parent.glob(f"{file.stem[: match.start()]}-*{file.suffix}"))
    try:
        return Part(file, {name: x for each in shards for name, x in _read(each).items()}, {})
    except (ValueError, OSError) as error:
        raise ModelError(str(error), where=file, hint="name a file of weights") from None


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        return _read(file)
    except (ValueError, OSError):
        return {}


def _read(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in content_of(file).tensors.items()}
