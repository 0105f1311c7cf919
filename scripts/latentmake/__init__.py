"""Latentmake: make, for the caches that diffusion training eats.

The package knows nothing of Snakemake: the Snakefile and the entries in `scripts/` hand it plain
values. Importing this name, or any of the planning modules (`config`, `dataset`, `recipe`, `memo`,
`plan`, `layouts`), never imports torch.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
