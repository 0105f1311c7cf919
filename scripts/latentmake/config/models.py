"""Models: encoders, and the network to train."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from latentmake.config.architectures import ARCHITECTURES, GENERIC, WAN
from latentmake.config.model_checks import check_model
from latentmake.config.model_keys import ModelKeys


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
