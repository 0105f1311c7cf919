"""Layouts: names of cache files, and whatever else differs between the caches of trainers."""

from __future__ import annotations

from latentmake.layouts.layout import (
    DROPPED,
    Layout,
    Named,
    beside,
    kind_of,
    size_of,
    text_of,
)
from latentmake.layouts.musubi import LAYOUTS as MUSUBI
from latentmake.layouts.plain import Plain
from latentmake.layouts.sdscripts import LAYOUTS as SDSCRIPTS

__all__ = ["DROPPED", "Layout", "Named", "beside", "endings", "kind_of", "of", "size_of", "text_of"]

_LAYOUTS: dict[str, Layout] = {each.name: each for each in (Plain(), *MUSUBI, *SDSCRIPTS)}


def of(name: str) -> Layout:
    """Return a layout: `plain`, `musubi` (Wan), `musubi-qwen_image`, `sdscripts-sdxl` and so on.

    Raises:
        KeyError: there is none of this name.
    """
    return _LAYOUTS[name]


def endings(kind: str) -> list[str]:
    """Return the ends of the names of all caches of `latents` or `text`."""
    found = (
        each.text_ending if kind == "text" else each.latents_ending for each in _LAYOUTS.values()
    )
    return sorted({ending for ending in found if ending is not None})
