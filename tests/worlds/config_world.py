"""The smallest configuration, and changes of it."""

from __future__ import annotations

from typing import Any


def smallest() -> dict[str, Any]:
    """Return the smallest configuration."""
    return {
        "datasets": {"cats": {"path": "data/cats"}},
        "models": {"tiny": {"vae": "vae", "text": ["text_encoder"], "unet": "unet"}},
        "runs": {
            "first": {
                "datasets": ["cats"],
                "model": "tiny",
                "resolutions": [64],
                "trainer": {"kind": "sd"},
            }
        },
    }


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """Return the smallest configuration with one value put at a path."""
    values = smallest()
    section: Any = values
    for key in path[:-1]:
        section = section.setdefault(key, {}) if isinstance(section, dict) else section[key]
    section[path[-1]] = value
    return values
