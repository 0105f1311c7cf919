"""Models: encoders, and the network to train."""

from __future__ import annotations

from typing import Any, Self

from pydantic import TypeAdapter, ValidationError, model_validator

from latentmake.config.architectures import ARCHITECTURES, GENERIC, WAN, Architecture
from latentmake.config.model_checks import check_model
from latentmake.config.model_keys import ModelKeys
from latentmake.config.weights import LocalPlace

_PLACE: TypeAdapter[str] = TypeAdapter(LocalPlace)


def _of_checkpoint(values: dict[str, Any], row: Architecture) -> dict[str, Any]:
    """Return the keys of a model with the parts that its `checkpoint` holds and no key names.

    The network that sd-scripts trains stays the `checkpoint`.
    """
    if not row.checkpoints or not values.get("checkpoint") or values.get("task") is not None:
        return values
    try:
        path = _PLACE.validate_python(values["checkpoint"])
    except ValidationError:
        return values  # said of its own key
    keys = ("vae",) if values.get("layout") == "sdscripts" else ("vae", "unet")
    own = {key: {"path": path, "subfolder": key} for key in keys if values.get(key) is None}
    number = max(1, len(row.text_encoders))
    text = values.get("text") or {}
    texts = text if isinstance(text, list) else [text] * number if _no_place(text) else [text]
    names = ["text_encoder", *(f"text_encoder_{index}" for index in range(2, len(texts) + 1))]
    filled = [
        {"path": path, "subfolder": name, **each} if _no_place(each) else each
        for each, name in zip(texts, names, strict=False)
    ]
    return {**values, **own, "text": filled}


def _no_place(text: object) -> bool:
    """Whether a text encoder's section names neither file nor folder."""
    return isinstance(text, dict) and not text.get("path") and not text.get("hub")


class Model(ModelKeys):
    """Encoders whose caches a trainer reads, and the network to train."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_architecture(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("vae"), dict) and not any(values["vae"].values()):
            values = {key: values[key] for key in values if key != "vae"}  # NO_WEIGHTS, as written
        name, task = values.get("architecture"), values.get("task")
        if name == WAN.name:
            name, values = None, {key: values[key] for key in values if key != "architecture"}
        row = ARCHITECTURES.get(name, GENERIC) if isinstance(name, str) else GENERIC
        values = _of_checkpoint(values, row)
        if row.scripts is not None:
            (only, *others) = row.scripts.versions
            given = {} if others or not only else {"task": only}
            forced = {"dtype": "bfloat16", "layout": "musubi", "encoder": "musubi"}
            return {**forced, **given, **values}
        if row.strategies is not None and not row.encodes:
            return {**row.strategies.defaults, **values}
        if name is None and task is not None:
            return {"dtype": "bfloat16", "layout": "musubi", **values}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_model(self)
        return self
