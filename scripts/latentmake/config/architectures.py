"""Model architectures: a table of facts, so that the rest of the package compares no names.

The facts are rows of `sdscripts.yaml` and `musubi.yaml`, see `config.rows`. Sources: sd-scripts'
library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and flux_models.py;
`verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml
from pydantic import TypeAdapter

from latentmake.config.rows import Architecture, Scripts, Strategies

Row = TypeVar("Row")
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C where it can be


def rows(file: Path, kind: type[Row]) -> dict[str, Row]:
    """Return the rows of a YAML file by their names.

    A row has the values of the row that it is `like`, except where it sets its own. Names that
    begin with `_` are no rows.
    """
    written = yaml.load(file.read_text("utf-8"), _SafeLoader)  # noqa: S506 -- it is safe
    validate = TypeAdapter(kind).validate_python

    def values(name: str) -> dict[str, Any]:
        like = written[name].pop("like", None)
        if like:
            written[name] = _laid_over(written[name], values(like))
        return dict(written[name])

    return {name: validate(values(name)) for name in written if name[0] != "_"}


def _laid_over(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of a base where there are none."""
    inner = {
        key: _laid_over(values[key], base[key])
        for key in values.keys() & base.keys()
        if isinstance(values[key], dict) and isinstance(base[key], dict)
    }
    return {**base, **values, **inner}


MUSUBI = rows(Path(__file__).with_name("musubi.yaml"), Scripts)
"""Architectures whose caches musubi-tuner's own scripts make; and Wan, whose caches may be ours."""
SDSCRIPTS = rows(Path(__file__).with_name("sdscripts.yaml"), Strategies)
"""Architectures that sd-scripts trains."""

_of_facts = TypeAdapter(Architecture).validate_python


def _of_row(name: str, row: Scripts | Strategies) -> Architecture:
    if isinstance(row, Strategies):
        return _of_facts({"name": name, **row.architecture})._replace(strategies=row)
    side = max(row.pixels, 16)
    videos = any(version.videos for version in row.versions.values())
    facts = {"side": side, "bucket_steps": side, "video": videos, "encodes": False}
    return _of_facts({"name": name, **(row.architecture or facts)})._replace(scripts=row)


ARCHITECTURES = {
    **{name: _of_row(name, row) for name, row in SDSCRIPTS.items()},
    **{name: _of_row(name, row) for name, row in MUSUBI.items()},
}
"""Name in the configuration -> facts. A Wan model has a `task` in place of a name."""
WAN = ARCHITECTURES.pop("wan")


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
