"""Records of earlier releases, read as parts of products.

Releases before 0.3 wrote digests under other names, and the named values behind them into a file of
their own. Their trainings, clips and evaluations stay up to date, because the records are read as
parts with the same digests. This module is deleted with release 0.5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latentmake.base.state_file import read_state

BASIS = "trained_on.json"
"""File beside a record of trained weights that has the named values behind its digests."""

_PARTS = {"data": "dataset", "settings": "settings", "weights": "network"}
_VERSION = "version of the trainer"
_LORA = "trained LoRA"
_EVALUATED = "settings and held-out items"


def with_parts(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a record, with `parts` in place of an earlier release's digests."""
    match content:
        case {"parts": _}:
            return content
        case {"wanted": str(key), "settings": dict(settings)}:  # an evaluation
            values = {name: value for name, value in settings.items() if name != "items"}
            own = {"parts": {_EVALUATED: key}, "values": {_EVALUATED: values}}
            return {**content, **own, "items": settings.get("items", "")}
        case {"weights": networks, "settings": dict(settings), "clips": list(clips)}:  # an index
            used = (clip.get("adapter") for clip in clips if isinstance(clip, dict))
            lora = next(filter(None, used), None)
            return {**content, "parts": {"networks": networks, **settings, _LORA: lora}}
    wanted = content.get("wanted", content if "data" in content else None)
    if not isinstance(wanted, dict):
        return content
    if missing := _PARTS.keys() - wanted.keys():
        raise ValueError(f"it has no digest of {min(missing)}")
    parts = {name: wanted[key] for key, name in _PARTS.items()}
    parts[_VERSION] = wanted.get("version", 1)
    return {**content, "parts": parts}


def named_values(folder: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the values and places of a record in a folder; empty if they are unknown.

    `parts` are those of the record. The values may belong to another training.
    """
    content: Any = read_state(folder / BASIS, json.loads)
    try:
        if with_parts(content)["parts"] != parts:
            return {}
        values = {"dataset": content["data"], "settings": content["settings"]}
        return {"values": values, "places": {"network": content["network"]}}
    except (TypeError, KeyError, AttributeError, ValueError):
        return {}
