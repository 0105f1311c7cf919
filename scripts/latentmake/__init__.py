"""Latentmake: a make-style build system for the caches that diffusion trainers read.

The package knows nothing of Snakemake: the Snakefile and the entries in `scripts/` hand it plain
values. Importing this name, or any of the planning modules (`config`, `sources`, `models`, `index`,
`plan`, `layouts`), never imports torch. The datasets for training loops are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentmake.trainers.loop.cached_clips import CachedClipDataset, ClipDataset, collate_fn

__version__ = "0.2.0"

PLAN_VERSION = 4
"""Version of the rules that decide which files make an item, how captions are read and composed,
and which targets are stale. It is raised if they change; then no remembered state counts."""

__all__ = ["PLAN_VERSION", "CachedClipDataset", "ClipDataset", "__version__", "collate_fn"]

_LAZY = {
    "CachedClipDataset": "latentmake.trainers.loop.cached_clips",
    "ClipDataset": "latentmake.trainers.loop.cached_clips",
    "collate_fn": "latentmake.trainers.loop.cached_clips",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)
