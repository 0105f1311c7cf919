"""Check of the files of a model of musubi-tuner: present, and of the architecture.

A file is told by the names of its tensors, which a header or a pickle holds; no tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.models import Model
from latentmake.config.rows import Scripts
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.files.safetensors import read_head
from latentmake.models import wan_files
from latentmake.models.encoder_files import encoder_files
from latentmake.models.scripted import scripted_files
from latentmake.models.wan_files import ModelFile
from latentmake.models.weight_kinds import content_of, weight_file

_NETWORK = "dit"
_REFUSED = frozenset({"LoRA"})  # kinds that are no network, whatever else their names say


def networks(model: Model) -> Iterator[ModelFile]:
    """Yield the files of a model that are trained, inspected."""
    if model.spec.encodes:
        yield from wan_files.networks(model)
    else:
        yield _network(model, _scripts(model))


def model_files(model: Model) -> Iterator[ModelFile]:
    """Yield all files of a model, inspected."""
    if model.spec.encodes:
        yield from wan_files.model_files(model)
        return
    scripts = _scripts(model)
    yield _network(model, scripts)
    named: dict[str, ModelFile] = {}
    for kind in ("latents", "text"):
        for file in encoder_files(model, kind):
            named.setdefault(file.key, file)
    yield from (file for key, file in named.items() if key != _NETWORK)


def _scripts(model: Model) -> Scripts:
    assert model.spec.scripts is not None
    return model.spec.scripts


def _network(model: Model, scripts: Scripts) -> ModelFile:
    """Return the network that is trained, inspected."""
    place = model.dit
    if place is None:
        return ModelFile(_NETWORK, "", fault="is not set: there is no network to train")
    try:
        content = content_of(weight_file(Path(place)))
        scripted_files(Weights(path=place))
    except ValueError as error:
        return ModelFile(_NETWORK, place, fault=str(error))
    except ModelError as error:
        return ModelFile(_NETWORK, place, fault=f"{error.what} ({error.where})")
    except OSError as error:
        return ModelFile(_NETWORK, place, fault=f"cannot be read ({error.strerror})")
    found = ModelFile(_NETWORK, place, content, known=f"{scripts.title} DiT")
    if content.kind in _REFUSED:
        return found._replace(fault=f"is a {content.kind}, not a {scripts.title} DiT")
    if _has(content.tensors, scripts.mark):
        return found._replace(fault=_stamp_fault(Path(place), scripts))
    for other in (WAN, *ARCHITECTURES.values()):
        if other.scripts is not None and _has(content.tensors, other.scripts.mark):
            fault = f"is a {other.scripts.title} DiT, not a {scripts.title} DiT"
            return found._replace(fault=fault)
    return found._replace(doubt=f"is not known as a {scripts.title} DiT")


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


def _has(names: Iterable[str], mark: str) -> bool:
    return any(re.search(mark, name) for name in names)
