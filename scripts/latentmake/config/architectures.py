"""Model architectures: a table of facts, so that the rest of the package compares no names.

The facts are rows of `sdscripts.yaml` and `musubi.yaml`, see `config.rows`. Sources: sd-scripts'
library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and flux_models.py;
`verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from latentmake.config.rows import MUSUBI, SDSCRIPTS, Scripts, Strategies
from latentmake.config.spec import Architecture, ClipOutput


def _own(name: str, facts: Mapping[str, Any], **row: Any) -> Architecture:
    """Return an architecture that our own encoders know."""
    tuples: dict[str, Any] = {
        "text_encoders": tuple(facts.get("text_encoders", ())),
        "clips": tuple(ClipOutput(**clip) for clip in facts.get("clips", ())),
        "scale": tuple(facts["scale"]) if "scale" in facts else None,
    }
    return Architecture(name, **{**facts, **tuples}, **row)


def _by_strategies(name: str, row: Strategies) -> Architecture:
    if row.architecture:
        return _own(name, row.architecture, strategies=row)
    return Architecture(
        name,
        single_file=True,
        sized_arrays=True,
        side=row.side,
        bucket_divisor=row.divisor,
        strategies=row,
        encodes=False,
    )


def _by_scripts(name: str, row: Scripts) -> Architecture:
    if row.architecture:
        return _own(name, row.architecture, scripts=row)
    side = max(row.pixels, 16)
    video = any(version.videos for version in row.versions.values())
    return Architecture(name, side=side, bucket_steps=side, video=video, scripts=row, encodes=False)


@cache
def _architecture(name: str) -> Architecture:
    if name in SDSCRIPTS:
        return _by_strategies(name, SDSCRIPTS[name])
    return _by_scripts(name, MUSUBI[name])


class _Architectures(Mapping[str, Architecture]):
    """Architectures by name; each is read when it is asked for."""

    def __getitem__(self, name: str) -> Architecture:
        if name not in self:
            raise KeyError(name)
        return _architecture(name)

    def __contains__(self, name: object) -> bool:
        return name in SDSCRIPTS or (name in MUSUBI and name != "wan")

    def __iter__(self) -> Iterator[str]:
        yield from SDSCRIPTS
        yield from (name for name in MUSUBI if name != "wan")

    def __len__(self) -> int:
        return sum(1 for _ in self)


WAN = _architecture("wan")
ARCHITECTURES: Mapping[str, Architecture] = _Architectures()
"""Name in the configuration -> facts. A Wan model has a `task` in place of a name."""


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
