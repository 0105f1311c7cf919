"""Command lines of musubi-tuner's caching scripts, as lists of arguments.

Scripts, flags and versions come from the row of the architecture, see `config.rows`. Paths come
in as the machine that runs the command names them.
"""

from __future__ import annotations

from collections.abc import Callable

from latentmake.config.models import Model
from latentmake.config.rows import File
from latentmake.config.weights import Weights
from latentmake.models.files import script_of
from latentmake.training.external.arguments import command_line


def caching_arguments(
    model: Model,
    kind: str,
    *,
    dataset_config: str,
    place: Callable[[File, Weights], str],
    batch_size: int | None = None,
    num_workers: int | None = None,
    skip_existing: bool = True,
    keep_cache: bool = True,
) -> list[str]:
    """Return the arguments of the script that caches `latents` or `text` of a model.

    Args:
        model: one that musubi-tuner knows.
        kind: `latents` or `text`.
        dataset_config: path of the dataset TOML.
        place: returns the path of weights for one of the script's flags.
        batch_size: items encoded at once; None leaves it to the script.
        num_workers: workers that read images; None leaves it to the script.
        skip_existing: pass over items that have a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    script = script_of(model, kind)
    files: dict[str, str | float | bool | None] = {}
    for file in script.files:
        weights = model.weights(file.key)
        files[file.flag] = None if weights is None else place(file, weights)
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    if dtype is None and model.spec.encodes and kind != "text":
        dtype = model.dtype  # as ours would encode
    arguments = command_line(
        {
            "--dataset_config": dataset_config,
            **files,
            **({script.dtype_flag: dtype} if script.dtype_flag else {}),
            **{flag: bool(getattr(model, key)) for flag, key in script.switches},
            "--batch_size": batch_size,
            "--num_workers": num_workers,
            "--skip_existing": skip_existing,
            "--keep_cache": keep_cache,
        }
    )
    return [*model.version.caching(kind), *arguments, *model.further_arguments(kind)]
