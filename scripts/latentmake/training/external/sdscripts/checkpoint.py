"""Check of the files that a training by sd-scripts starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from latentmake.config import hub
from latentmake.models.kinds import lack
from latentmake.models.model_files import ModelFile
from latentmake.training.external.sdscripts.command import encoder_places
from latentmake.training.external.sdscripts.order import SdScriptsOrder


def model_files(order: SdScriptsOrder) -> Iterator[ModelFile]:
    """Yield the checkpoint, inspected, and the encoders that a script cannot be given."""
    yield ModelFile("checkpoint", order.model.checkpoint or "", fault=_checkpoint_fault(order))
    keys = {file.flag: file.key for file in order.strategies.files}
    for flag, path in encoder_places(order).items() if order.strategies.insists else ():
        place = Path(path)
        if not (place.is_file() or (flag in order.strategies.folders and place.is_dir())):
            fault = f"is no file: name one, or add [{flag}, FILE] to the trainer's `arguments`"
            yield ModelFile(keys[flag], path, fault=fault)


def _checkpoint_fault(order: SdScriptsOrder) -> str:
    place, title = Path(order.model.checkpoint or ""), order.architecture
    if not place.exists():
        return hub.absence(place)
    if not (place.is_file() or place.is_dir()):
        return "is no regular file"
    if place.is_dir() and order.model.spec.single_file:
        hint = "name the .safetensors file of the original release"
        return f"is a folder, and sd-scripts reads {title} from one file: {hint}"
    if place.suffix != ".safetensors":
        return ""
    return lack(place, order.strategies.marks, f"network of {title}")
