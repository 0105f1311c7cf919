"""Files of a model that musubi-tuner knows: present, and of the kind that the configuration says.

Headers tell a file, see `models.kinds`: no tensor is read. Names that are not known pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.models import Model
from latentmake.config.rows import File, Scripts, Vae
from latentmake.errors import ModelError
from latentmake.files.safetensors import Tensor, read_head
from latentmake.models.files import script_of, scripted_files
from latentmake.models.kinds import (
    LORA,
    SUFFIXES,
    kinds_of,
    library_of,
    one,
    tensors_of,
    vae_of,
    weight_file,
)

DIT = "Wan DiT"
_CHANNELS = {"i2v": 36, "flf2v": 36, "t2v": 16, "t2i": 16, "FC": 48}  # of a Wan DiT's input
_WIDTHS = {"14B": 5120, "1.3B": 1536, "A14B": 5120}  # of its blocks
_ORIGINALS = {
    "dit": "the original release's file, such as wan2.1_t2v_14B_bf16.safetensors",
    "dit_high_noise": "the original release's file",
    "vae": "the original Wan2.1_VAE.pth",
    "text": "the original models_t5_umt5-xxl-enc-bf16.pth",
    "clip": "the original models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
}
_FOREIGN_VAES = frozenset({Vae(2, 4), Vae(3, 48, 12)})  # SDXL's, and that of Wan 2.2's 5B model


class ModelFile(NamedTuple):
    """One of a model's files.

    Attributes:
        key: its key in the configuration.
        place: its path, or its id on the hub.
        tensors: by name; none where they cannot be read, or are on the hub.
        fault: why it cannot be used.
        doubt: why it might be unusable.
        known: what it is.
    """

    key: str
    place: str
    tensors: Mapping[str, Tensor] = {}
    fault: str = ""
    doubt: str = ""
    known: str = ""


def model_files(model: Model) -> Iterator[ModelFile]:
    """Yield all files of a model, inspected."""
    yield from networks(model)
    named = {file.key: file for kind in ("latents", "text") for file in encoders(model, kind)}
    yield from (file for key, file in named.items() if key != "dit")


def networks(model: Model) -> Iterator[ModelFile]:
    """Yield the files of a model that are trained, inspected."""
    yield _network(model, "dit", model.dit)
    if model.dit_high_noise is not None:
        yield _network(model, "dit_high_noise", model.dit_high_noise)


def encoder_fault(model: Model, kind: str) -> tuple[str, str] | None:
    """Return the fault of the first unusable encoder of `latents` or `text`.

    Returns:
        Its key in the configuration, and the fault of its file; None where all may do. That an
        encoder is not set is the configuration's to say.
    """
    files = (x for x in encoders(model, kind) if x.fault and x.place)
    return next(((x.key.partition(".")[0], f"{x.place}: {x.fault}") for x in files), None)


def encoders(model: Model, kind: str) -> Iterator[ModelFile]:
    """Yield the files that encode `latents` or `text`, inspected."""
    for file in script_of(model, kind).files:
        weights = model.weights(file.key)
        if weights is not None and weights.path is not None:
            yield _encoder(model, file, Path(weights.path))
        elif weights is not None:
            yield ModelFile(
                file.key, str(weights.hub), doubt="is on the hub, and was not inspected"
            )
        elif file.required:
            yield ModelFile(file.key, "", fault=f"is not set, and {model.title} needs it")
        elif file.key == "clip" and model.needs_clip:
            yield ModelFile(file.key, "", fault=f"is not set, and {model.task} needs it")


def _encoder(model: Model, file: File, place: Path) -> ModelFile:
    """Return the file or folder of an encoder, inspected; ours take any form."""
    found, wan = ModelFile(file.key, str(place)), model.spec.encodes
    kind = f"Wan {file.kind}" if wan and file.kind == "VAE" else file.kind
    form = "either" if wan else file.form
    if place.is_dir() and form == "file":
        return found._replace(fault=f"is a folder, and the script reads one file of {one(kind)}")
    if place.is_file() and form == "folder":
        return found._replace(fault=f"is a file, and the script reads the folder of {one(kind)}")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    if not wan and place.exists() and not any(x.suffix in SUFFIXES for x in files):
        return found._replace(known="is there")  # in a format that only the script knows
    try:
        tensors = _tensors(place, shards=not wan)
    except ValueError as error:
        return found._replace(fault=str(error))
    found = found._replace(tensors=tensors, known=kind or "is there")
    if fault := fault_of(file._replace(kind=kind), tensors):
        return found._replace(fault=fault)
    if wan and not kinds_of(tensors):
        return found._replace(doubt=f"is not known as {one(kind)}")
    return _original(found, kind, demanded=model.scripted) if wan else found


def _tensors(place: Path, *, shards: bool) -> Mapping[str, Tensor]:
    """Return the tensors of the file that stands for some weights; raises ValueError.

    With `shards`, a file that is one of several needs the others.
    """
    try:
        file = weight_file(place)
        if shards:
            scripted_files(place)
        return tensors_of(file)
    except ModelError as error:
        raise ValueError(f"{error.what} ({error.where})") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


def fault_of(file: File, tensors: Mapping[str, Tensor]) -> str:
    """Return why tensors are not those that a script takes; "" where they may be."""
    kinds = kinds_of(tensors)
    if kinds and file.kind and file.kind not in (*kinds, *kinds.values()):
        return f"is {one(next(iter(kinds.values())))}, not {one(file.kind)}"
    found = vae_of(tensors)
    if file.vae is None or found is None or found == file.vae or found not in _known_vaes():
        return ""
    return f"is a VAE {_words(found)}, and not one {_words(file.vae)}"


def _known_vaes() -> set[Vae]:
    files = (file for row in _rows() for file in row.latents.files)
    return {*_FOREIGN_VAES, *(file.vae for file in files if file.vae is not None)}


def _rows() -> Iterator[Scripts]:
    return (x.scripts for x in (WAN, *ARCHITECTURES.values()) if x.scripts is not None)


def _words(vae: Vae) -> str:
    what = "videos" if vae.axes == 3 else "pictures"
    alpha = " with transparency" if vae.colours == 4 else ""
    return f"for {what}{alpha}, whose latents have {vae.channels} channels"


def _original(file: ModelFile, kind: str, *, demanded: bool) -> ModelFile:
    """Return a file of Wan with a fault or doubt where musubi-tuner could not read it."""
    library = library_of(kind, file.tensors)
    if library is None:
        return file
    names, hint = f"is in {library}' names", _ORIGINALS[file.key]
    if demanded:
        return file._replace(fault=f"{names}, which musubi-tuner cannot read: name {hint}")
    return file._replace(
        doubt=f"{names}: its caches are made here, and musubi-tuner's own caching scripts would "
        f"need {hint}"
    )


# -- the network that is trained ------------------------------------------------------------------


def _network(model: Model, key: str, place: str | None) -> ModelFile:
    """Return a network that is trained, inspected."""
    scripts, wan = model.spec.scripts, model.spec.encodes
    assert scripts is not None
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    title = f"{scripts.title} DiT"
    found = ModelFile(key, place, known=title)
    try:
        tensors = _tensors(Path(place), shards=not wan)
    except ValueError as error:
        return found._replace(fault=str(error))
    found, kinds = found._replace(tensors=tensors), kinds_of(tensors)
    if LORA in kinds or (wan and kinds and kinds.get("DiT") != DIT):
        return found._replace(fault=f"is {one(next(iter(kinds.values())))}, not a {title}")
    if wan and kinds:
        return _wan_network(model, _original(found, DIT, demanded=True))
    if _has(tensors, scripts):
        return found._replace(fault=_stamp_fault(Path(place), scripts))
    for other in _rows():
        if _has(tensors, other):
            return found._replace(fault=f"is a {other.title} DiT, not a {title}")
    return found._replace(doubt=f"is not known as a {title}")


def _has(tensors: Mapping[str, Tensor], scripts: Scripts) -> bool:
    return any(re.search(scripts.mark, name) for name in tensors)


def _stamp_fault(path: Path, scripts: Scripts) -> str:
    """Return why a DiT's header is not what its training script demands; "" where it is."""
    if scripts.stamp is None:
        return ""
    key, expected = scripts.stamp
    try:
        given = read_head(weight_file(path)).metadata.get(key)
    except (OSError, ValueError):
        return "is no .safetensors file, which its training script demands"
    if given == expected:
        return ""
    said = f"`{given}`" if given else "none"
    return f"has {said} as `{key}` in its header, where `{expected}` is demanded"


def _wan_network(model: Model, file: ModelFile) -> ModelFile:
    if file.fault or model.task is None:
        return file
    if fault := other_task(model.task, file.tensors):
        return file._replace(fault=fault)
    if weight_file(Path(file.place)).suffix != ".safetensors":
        return file._replace(doubt="is no .safetensors file, which alone musubi-tuner reads")
    return file


def other_task(task: str, tensors: Mapping[str, Tensor]) -> str:
    """Return why a Wan DiT is another task's; "" where it fits, or has sizes of no Wan model."""
    family, _, size = task.removesuffix("-FC").partition("-")
    channels = _CHANNELS["FC" if task.endswith("-FC") else family]
    for name, tensor in tensors.items():
        if not name.endswith("patch_embedding.weight") or len(tensor.shape) != 5:
            continue
        width, inputs = tensor.shape[:2]
        if inputs != channels and inputs in _CHANNELS.values():
            return f"is a Wan DiT of {inputs} input channels; {task} has {channels}"
        if width != _WIDTHS[size] and width in _WIDTHS.values():
            return f"is a Wan DiT of width {width}; {task} has {_WIDTHS[size]}"
    return ""
