"""Networks that musubi-tuner trains: present, and of the architecture and task of their model.

Headers tell a file: no tensor is read. Networks whose names are unknown pass, with a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from latentmake.config.architectures import MUSUBI, Scripts
from latentmake.config.models import Model
from latentmake.files.safetensors import Tensor, read_head
from latentmake.models.checks import (
    DIT,
    ModelFile,
    encoders,
    in_original_names,
    other_task,
    tensors_at,
)
from latentmake.models.headers import LORA, kinds_of, one, weight_file


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


def _network(model: Model, key: str, place: str | None) -> ModelFile:
    """Return a network that is trained, inspected."""
    scripts, wan = model.spec.scripts, model.spec.encodes
    assert scripts is not None
    if place is None:
        return ModelFile(key, "", fault="is not set: there is no network to train")
    title = f"{scripts.title} DiT"
    found = ModelFile(key, place, known=title)
    try:
        tensors = tensors_at(Path(place))
    except ValueError as error:
        return found._replace(fault=str(error))
    found, kinds = found._replace(tensors=tensors), kinds_of(tensors)
    if LORA in kinds or (wan and kinds and kinds.get("DiT") != DIT):
        return found._replace(fault=f"is {one(next(iter(kinds.values())))}, not a {title}")
    if wan and kinds:
        return _wan_network(model, in_original_names(found, DIT, demanded=True))
    if _has(tensors, scripts):
        return found._replace(fault=_stamp_fault(Path(place), scripts))
    for other in MUSUBI.values():
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
