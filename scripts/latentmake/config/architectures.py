"""Model architectures as rows of facts, so that other modules never compare names of models.

The rows are in `sdscripts.yaml` and `musubi.yaml`; the fields of `config.makers.Architecture` are
their keys.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py, `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs,
*_cache_*.py and *_train*.py, dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from latentmake.config.makers import Architecture, Scripts, Strategies

TEXT_ENCODERS = {
    **{"CLIP-L": ("CLIP text encoder", 768), "OpenCLIP-H": ("CLIP text encoder", 1024)},
    **{"CLIP-G": ("CLIP text encoder", 1280), "T5": ("T5", 32128), "umT5": ("T5", 256384)},
}
"""Name in `text_encoders` -> kind in `models.headers`, and published size.

The size is the width of a CLIP, or the vocabulary of a T5.
"""
GENERIC = Architecture(checkpoints=True)
"""Facts for a model without `architecture`: caches keep the last layer of each text encoder."""

# The C version is much faster, but some installations of PyYAML lack it.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _rows(file: str) -> dict[str, dict[str, Any]]:
    """Return name -> row of a YAML file.

    A row inherits the values of the row that it is `like`. Names that begin with `_` are only for
    inheritance, and not returned.
    """
    text = Path(__file__).with_name(file).read_text("utf-8")
    written = yaml.load(text, _SafeLoader)  # noqa: S506 -- a safe loader

    def values(name: str) -> dict[str, Any]:
        row = dict(written[name])
        like = row.pop("like", None)
        return _merged(row, values(like)) if like else row

    return {name: {"name": name, **values(name)} for name in written if name[0] != "_"}


def _merged(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values over those of a base, also in mappings below them."""
    result = {**base, **values}
    for key in values.keys() & base.keys():
        if isinstance(values[key], dict) and isinstance(base[key], dict):
            result[key] = _merged(values[key], base[key])
    return result


def _scripts(row: dict[str, Any]) -> Scripts:
    """Return a row of musubi-tuner, with its default `header` and sides, and names of scripts."""
    side = max(row.get("pixels", 8), 16)
    usual: dict[str, Any] = {"header": row["name"], "side": side, "bucket_steps": side}
    if program := row.pop("program", None):
        usual |= {part: {"name": f"{program}_{ending}.py"} for part, ending in _ENDINGS.items()}
    flags = row.pop("task_flags", {}).items()
    for name, version in row.get("versions", {}).items():
        named = {part: [flag, name] for part, flag in flags if name}
        row["versions"][name] = {**named, **version}
    return Scripts.model_validate(_merged(row, usual))


_ENDINGS = {
    "latents": "cache_latents",
    "text": "cache_text_encoder_outputs",
    "training": "train_network",
}
MUSUBI = {name: _scripts(row) for name, row in _rows("musubi.yaml").items()}
"""Architectures that musubi-tuner trains. Its scripts make the caches; for Wan, Latentmake can."""
SDSCRIPTS = {name: Strategies.model_validate(row) for name, row in _rows("sdscripts.yaml").items()}
"""Architectures that sd-scripts trains."""
ROWS: Mapping[str, Architecture] = {**SDSCRIPTS, **MUSUBI}
"""All architectures."""
ARCHITECTURES = dict(ROWS)
WAN = ARCHITECTURES.pop("wan")  # its models have only a `task`
"""Facts for Wan; `ARCHITECTURES` has those that the configuration names."""


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other name
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
