"""Encoding by sd-scripts' own caching strategies.

The driver calls the strategies themselves, because sd-scripts' caching tools support few models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from latentmake.config.makers import Call, Encoder, Network
from latentmake.config.models import Model
from latentmake.encode.reading import stored_size
from latentmake.formats import npz
from latentmake.geometry.buckets import Placement
from latentmake.models.cache_recipe import encoder_of, options_of
from latentmake.trainers.launched.encode import Content, Encoding, PendingTarget
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.order import absolute
from latentmake.trainers.sdscripts.order import find


class StrategiesEncoding(Encoding):
    """Encoding by sd-scripts' strategies; each target is one item of the driver's job."""

    program = "sd-scripts"

    def amount(self, pending: PendingTarget) -> int:
        """Return the pixels of a target's bucket, or the letters of its caption."""
        if pending.caption is not None:
            return len(pending.caption)
        bucket = self._fitted_size(pending).target
        return bucket.width * bucket.height

    def place(self, pending: PendingTarget) -> Path:
        return self.folder / f"{pending.key}.npz"

    def start(self) -> tuple[Installation, dict[str, Any]]:
        order, model = self.order, self.order.model_settings
        assert order.sd_scripts is not None
        program = find(model.spec.strategies.training_scripts[0], order.sd_scripts)
        items = [
            (self.amount(pending), self._item(path, pending)) for path, pending in self.left.items()
        ]
        items.sort(key=lambda pair: (pair[0], pair[1].get("bucket", ()), pair[1]["file"]))
        return program, {
            "folder": str(program.folder),
            **_encoder(model, encoder_of(model, order.kind), order.kind),
            "flip_aug": order.dataset_settings.flip_aug,
            "alpha_mask": order.dataset_settings.alpha_mask,
            "items": [item for _, item in items],
        }

    def content(self, path: Path, pending: PendingTarget) -> Content:
        arrays = {name: torch.from_numpy(array) for name, array in npz.load(path).items()}
        names = encoder_of(self.order.model_settings, self.order.kind).arrays
        missing = [
            prefix for prefix in names if not any(name.startswith(prefix) for name in arrays)
        ]
        if missing:
            raise ValueError(f"holds {', '.join(sorted(arrays))}, not {', '.join(missing)}")
        if pending.caption is None:
            return arrays, {}, None
        # The masks of a short caption may be all zeros, so only the first array is checked; the
        # embedding of an empty caption may be all zeros, too.
        return arrays, {}, names[:1] if pending.caption else names[:0]

    def _item(self, path: str, pending: PendingTarget) -> dict[str, Any]:
        seed = (int(pending.key[:15], 16) + self.order.model_settings.posterior_seed) % 2**63
        entry: dict[str, Any] = {"file": path, "seed": seed}
        if pending.caption is not None:
            return entry | {"caption": pending.caption}
        fitted = self._fitted_size(pending)
        return entry | {
            "image": absolute(pending.item.source or ""),
            "size": list(stored_size(pending.item)),
            "bucket": list(fitted.target),
            "resized": list(fitted.resized),
        }

    def _fitted_size(self, pending: PendingTarget) -> Placement:
        size, path = stored_size(pending.item), pending.item.source or ""
        settings = self.order.dataset_settings
        return self.order.layout.place(size, pending.target.size or size, settings, path)


def _encoder(model: Model, encoder: Encoder, kind: str) -> dict[str, Any]:
    dtype = model.caption_dtype if kind == "text" else model.vae_dtype or model.dtype
    options = {
        encoder.options[flag].argument: absolute(str(value))
        if encoder.options[flag].kind == "path"
        else value
        for flag, value in options_of(model, kind).items()
    }
    networks = [
        _network(model, network, dtype, {} if encoder.tokenizer else options)
        for network in encoder.networks
    ]
    values: dict[str, Any] = {"strategy": encoder.strategy, "networks": networks}
    if encoder.tokenizer is not None:
        paths = {argument: _path(model, key) for argument, key in encoder.paths.items()}
        values["tokenizer"] = _call(encoder.tokenizer, {**paths, **options})
        values["encoding"] = encoder.encoding
        autocast = encoder.autocast and dtype != "float32"
        values["autocast"] = dtype if autocast else None
    return values


def _network(
    model: Model, network: Network, dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **_call(network.load, {network.path: _path(model, network.key), **options}),
        "dtype": network.dtype or dtype,
        "takes_dtype": network.takes_dtype,
        "place": network.place,
    }


def _call(call: Call, further: Mapping[str, Any]) -> dict[str, Any]:
    return {"call": call.name, "arguments": {**call.arguments, **further}}


def _path(model: Model, key: str) -> str:
    weights = model.weights(key)
    assert weights is not None  # the checks of the configuration demand it
    return absolute(weights.local)
