"""Check of the encoders that musubi-tuner's scripts read: present, and of the right kind.

A file is told by the names and shapes of its tensors, which its header holds: no tensor is read,
and names that are not known pass. The names are those that musubi-tuner's loaders take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake.config import hub
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.models import Model
from latentmake.config.rows import File, Vae
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.files.safetensors import Tensor

if TYPE_CHECKING:
    from latentmake.models.wan_files import ModelFile

LORA = "LoRA"
"""Kind of a LoRA's file."""
_KINDS: Mapping[str, str] = {
    LORA: r"lora_(down|up)|lora_[AB]\.|\.lora_",
    "VAE": r"^(vae\.|first_stage_model\.)?(encoder|decoder)\.(conv_in|conv1|down|up|mid)",
    "T5": r"(^|\.)encoder\.block\.|\.SelfAttention\.|^(token_embedding|shared)\.|\.ffn\.gate\.",
    "CLIP text encoder": r"(^|\.)text_model\.|^(embeddings\.token_embedding|text_projection)\b",
    "image encoder": (
        r"(^|\.)vision_model\.|^visual\.(transformer|patch_embedding)|"
        r"^embeddings\.(class|patch)_embedding\b"
    ),
    "language model": (
        r"(^|\.)(model|language_model)\.layers\.|^layers\.\d+\.(self_attn\.q_proj|mlp\.gate_proj)|"
        r"(^|\.)embed_tokens\.weight$"
    ),
    "UNet": r"^(down_blocks|input_blocks)\.",
    "DiT": (
        r"(^|\.)((double|single|transformer|single_transformer|joint)_blocks|noise_refiner)\.|"
        r"^(model\.)?diffusion_model\.|^blocks\.\d+\.(cross_attn|attn\d?)\.|^patch_embedding\."
    ),
}
"""Kind -> pattern of the names of its tensors; a complete checkpoint has several kinds."""

_FIRST = re.compile(r"(^|\.)encoder\.(conv_in|conv1)(\.conv)?\.weight$")
_LAST = re.compile(r"(^|\.)decoder\.(conv_in|conv1)(\.conv)?\.weight$")


def encoder_fault(model: Model, kind: str) -> tuple[str, str] | None:
    """Return the fault of the first unusable encoder of `latents` or `text`.

    Returns:
        Its key in the configuration, and the fault of its file; None where all may do.
    """
    from latentmake.models import wan_files

    if model.spec.scripts is None or model.spec.encodes:
        return wan_files.encoder_fault(model, kind)
    for file in encoder_files(model, kind):
        if file.fault:
            return file.key.partition(".")[0], f"{file.place}: {file.fault}"
    return None


def encoder_files(model: Model, kind: str) -> Iterator[ModelFile]:
    """Yield the files that the script of `latents` or `text` reads of a model, inspected."""
    from latentmake.models.scripted import script_of
    from latentmake.models.wan_files import ModelFile

    for file in script_of(model, kind).files:
        weights = model.weights(file.key)
        if weights is not None:
            yield _inspected(file, weights)
        elif file.required:
            yield ModelFile(file.key, "", fault=f"is not set, and {model.title} needs it")


def _inspected(file: File, weights: Weights) -> ModelFile:
    from latentmake.models.scripted import scripted_files
    from latentmake.models.wan_files import ModelFile
    from latentmake.models.weight_kinds import content_of

    assert weights.path is not None  # `models.places` knows that of a hub
    place = Path(weights.path)
    try:
        number = len(scripted_files(weights))
    except ModelError as error:
        fault = hub.absence(place) if not place.exists() else error.what
        return ModelFile(file.key, weights.path, fault=fault)
    found = ModelFile(
        file.key, weights.path, known="is there" if number == 1 else f"{number} files"
    )
    if place.is_dir() and file.form == "file":
        fault = f"is a folder, and the script reads one file of {one(file.kind)}"
        return found._replace(fault=fault)
    if place.is_file() and file.form == "folder":
        fault = f"is a file, and the script reads the folder of {one(file.kind)}"
        return found._replace(fault=fault)
    first = _first(place)
    if first is None:
        return found
    try:
        content = content_of(first)
    except (ValueError, OSError) as error:
        return found._replace(fault=str(error))
    fault = fault_of(file, content.tensors) or ""
    return found._replace(content=content, fault=fault, known=file.kind or found.known)


def _first(place: Path) -> Path | None:
    """Return the file of weights that stands for a file or folder; None where there is none."""
    from latentmake.models.weight_kinds import PICKLES

    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return next((each for each in files if each.suffix in (".safetensors", *PICKLES)), None)


def kinds_in(tensors: Iterable[str]) -> list[str]:
    """Return the kinds of network that tensors of these names belong to, the likeliest first."""
    names = "\n".join(tensors)
    kinds = [kind for kind, marks in _KINDS.items() if re.search(marks, names, re.MULTILINE)]
    return [LORA] if LORA in kinds else kinds


def fault_of(file: File, tensors: Mapping[str, Tensor]) -> str | None:
    """Return why tensors are not those that a script takes; None where they may be."""
    kinds = kinds_in(tensors)
    if kinds and file.kind and file.kind not in kinds:
        return f"is {one(kinds[0])}, not {one(file.kind)}"
    found = vae_of(tensors)
    if file.vae is None or found is None or found == file.vae or found not in _known():
        return None
    return f"is a VAE {_words(found)}, and not one {_words(file.vae)}"


def vae_of(tensors: Mapping[str, Tensor]) -> Vae | None:
    """Return the sizes of a VAE; None where its names or shapes are not known."""
    first = next((each.shape for name, each in tensors.items() if _FIRST.search(name)), ())
    last = next((each.shape for name, each in tensors.items() if _LAST.search(name)), ())
    if len(first) != len(last) or len(first) < 4:
        return None
    return Vae(len(last) - 2, last[1], first[1])


def _known() -> set[Vae]:
    """Return the sizes of all VAEs that some architecture has, SDXL's too."""
    rows = (row.scripts for row in (WAN, *ARCHITECTURES.values()) if row.scripts is not None)
    files = (file for row in rows for file in row.latents.files)
    return {file.vae for file in files if file.vae is not None} | {Vae(2, 4), Vae(3, 48, 12)}


def one(kind: str) -> str:
    """Return a kind with its article: `a VAE`, `an image encoder`."""
    return f"{'an' if kind[:1] == 'i' else 'a'} {kind or 'network'}"


def _words(vae: Vae) -> str:
    what = "videos" if vae.axes == 3 else "pictures"
    alpha = " with transparency" if vae.colours == 4 else ""
    return f"for {what}{alpha}, whose latents have {vae.channels} channels"
