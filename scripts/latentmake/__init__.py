"""Latentmake: a make-style build system for the caches that diffusion trainers read.

The package knows nothing of Snakemake: the Snakefile and the entries in `scripts/` hand it plain
values. Importing this name, or any of the planning modules (`config`, `dataset`, `recipe`, `memo`,
`plan`, `layouts`), never imports torch.
"""

__version__ = "0.1.0"

PLAN_VERSION = 1
"""Raised when the same files and settings would be judged otherwise: which files make an item, how
captions are read and composed, what is stale. No remembered verdict of before is then believed."""

__all__ = ["PLAN_VERSION", "__version__"]
