"""Check of the networks that a training by sd-scripts starts from."""

from __future__ import annotations

from pathlib import Path

from latentmake.config import hub
from latentmake.errors import ModelError
from latentmake.models.kinds import lack
from latentmake.training.external.sdscripts.command import encoder_places
from latentmake.training.external.sdscripts.order import SdScriptsOrder


def refuse_unreadable(order: SdScriptsOrder) -> None:
    """Refuse a network that sd-scripts could not load; raises ModelError."""
    where = f"models.{order.model_name}"
    place = Path(order.model.checkpoint or "")
    if not (place.is_file() or place.is_dir()):
        what = "is no regular file" if place.exists() else hub.absence(place)
        hint = "" if hub.download(place) else "correct its path"
        raise ModelError(f"{place} {what}", where=f"{where}.checkpoint", hint=hint)
    if place.is_dir() and order.model.spec.single_file:
        raise ModelError(
            f"{place} is a folder, and sd-scripts reads {order.architecture} from one file",
            where=f"{where}.checkpoint",
            hint="name the .safetensors file of the original release",
        )
    network = f"network of {order.architecture}"
    fault = lack(place, order.strategies.marks, network) if place.suffix == ".safetensors" else ""
    if fault:
        raise ModelError(
            f"{place} {fault}",
            where=f"{where}.checkpoint",
            hint=f"name a checkpoint of {order.architecture}",
        )
    for flag, path in encoder_places(order).items():
        if order.strategies.insists and not _may_be(order, flag, path):
            key = next(file.key for file in order.strategies.files if file.flag == flag)
            raise ModelError(
                f"{path} is no file, which sd-scripts' {flag} has to be",
                where=f"{where}.{key.partition('.')[0]}",
                hint=f"name the file there, or add [{flag}, FILE] to the trainer's `arguments`",
            )


def _may_be(order: SdScriptsOrder, flag: str, path: str) -> bool:
    """Whether something lies there that a script can be given."""
    return Path(path).is_file() or (flag in order.strategies.folders and Path(path).is_dir())
