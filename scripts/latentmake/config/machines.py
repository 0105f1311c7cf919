"""Paths and settings of one user's machines: external trainers, publication, S3, folders."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    WithJsonSchema,
    model_validator,
)

from latentmake.config.fields import (
    BatchSize,
    Closed,
    DiskPath,
    Number,
    ResolutionField,
    ascii_digits,
)
from latentmake.config.shapes import MACHINE, PUBLICATION, Shapes


class ExternalProgram(Closed):
    """Another trainer, musubi-tuner or sd-scripts, and the virtual environment that it runs in."""

    shapes: ClassVar[Shapes] = MACHINE

    path: DiskPath = Field(min_length=1)
    """Folder of the program."""
    venv: DiskPath | None = Field(None, min_length=1)
    """Its virtual environment; by default `venv` or `.venv` in its folder."""


class MusubiTuner(ExternalProgram):
    """musubi-tuner, and how its caching scripts run on this machine."""

    batch_size: BatchSize | None = None
    """Items that its caching scripts encode at once; by default their own choice."""
    num_workers: Number | None = Field(None, ge=1)
    """Threads that read images for its caching scripts; by default those of the job."""


class PathMap(Closed):
    """One folder, as several systems name it."""

    shapes: ClassVar[Shapes] = PUBLICATION

    linux: str | None = Field(None, min_length=1)
    """Its name under Linux."""
    windows: str | None = Field(None, min_length=1)
    """Its name under Windows."""
    wsl: str | None = Field(None, min_length=1)
    """Its name under WSL."""

    @model_validator(mode="after")
    def _two_names(self) -> Self:
        if sum(name is not None for name in (self.linux, self.windows, self.wsl)) < 2:
            raise ValueError("needs two of `linux`, `windows` and `wsl`")
        return self


_PLACEHOLDERS = ("run", "dataset", "model", "resolution", "width", "height")


def _folder_pattern(pattern: str) -> str:
    """Refuse a pattern with unknown placeholders, or of more than one folder."""
    known = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
    left = re.sub(rf"\{{({'|'.join(_PLACEHOLDERS)})\}}", "x", pattern)
    if "{" in left or "}" in left:
        raise ValueError(f"has a placeholder that is not known; known: {known}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", left):
        raise ValueError(
            f"should be a folder's name of letters, digits, `_`, `.`, `-` and the placeholders "
            f"{known}"
        )
    return pattern


class Publish(Closed):
    """Contents and place of `publish_{run}`."""

    shapes: ClassVar[Shapes] = PUBLICATION

    path: DiskPath = Field("published", min_length=1)
    """Folder that gets a folder for each published run."""
    path_maps: list[PathMap] = Field([])
    """Folders that other systems know by other names, so that scripts and TOML files name them
    rightly; drives under /mnt are known."""
    caches: bool = True
    """Encode here and publish the caches. `false`: encode nothing here; the published scripts make
    the caches on the trainer's machine."""
    attention: Literal["sdpa", "flash_attn", "flash3", "xformers", "mem_eff_attn"] | None = None
    """Attention of the trainer's machine; by default the trainer's, where `auto` is `sdpa`."""
    num_processes: Number | None = Field(None, ge=1)
    """--num_processes of accelerate launch in the published scripts."""
    batch_size: BatchSize | None = None
    """Items encoded at once by the caching steps of the published scripts."""
    num_workers: Number | None = Field(None, ge=1)
    """--num_workers of musubi-tuner's caching scripts."""
    powershell: bool = False
    """Write train_{run}.ps1 beside train_{run}.bat."""
    folder: Annotated[str, AfterValidator(_folder_pattern)] = "{dataset}_{resolution}"
    """Names of the folders of images, with the placeholders {run}, {dataset}, {model},
    {resolution}, {width} and {height}."""


class Export(Closed):
    """Place of the caches that `export_{run}` writes for ai-training."""

    shapes: ClassVar[Shapes] = PUBLICATION

    folder: DiskPath | None = Field(None, min_length=1)
    """Folder that gets them, in a folder for each dataset; by default they lie beside the
    images."""
    resolution: ResolutionField | None = None
    """One of a run's resolutions, where it has several."""
    overwrite: bool = False
    """Replace files of such names that latentmake did not write."""


class Store(Closed):
    """Limit of the store of cache files that builds replaced or removed."""

    shapes: ClassVar[Shapes] = MACHINE

    keep: Annotated[
        ByteSize,
        BeforeValidator(ascii_digits),
        Field(ge=0),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "minimum": 0},
                    {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? *([KMGTP]i?)?B?$"},
                ]
            }
        ),
    ] = Field(cast(ByteSize, "5 GB"), validate_default=True)
    """Most bytes of cache files that were replaced or removed (`5 GB`, `500 MB`); the oldest go
    first. 0 keeps none."""
