"""Layouts: names of cache files, and whatever else differs between the caches of trainers."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from latentmake.layouts.layout import (
    DROPPED,
    Layout,
    Named,
    beside,
    kind_of,
    size_of,
    text_of,
)

__all__ = ["DROPPED", "Layout", "Named", "beside", "kind_of", "of", "size_of", "text_of"]


@cache
def of(name: str) -> Layout:
    """Return a layout: `plain`, `musubi` (Wan), `musubi-qwen_image`, `sdscripts-sdxl` and so on.

    Raises:
        KeyError: there is none of this name.
    """
    module = import_module(f"latentmake.layouts.{name.partition('-')[0]}")
    layouts: tuple[Layout, ...] = module.LAYOUTS
    return {each.name: each for each in layouts}[name]
