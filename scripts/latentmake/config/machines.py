"""Where things lie on the machines of one user: other trainers, what is published, S3."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from latentmake.config.fields import Closed, DiskPath, Place, ResolutionField
from latentmake.config.shapes import MACHINE, PUBLICATION, Shapes

__all__ = ["Export", "MusubiTuner", "PathMap", "Publish", "SdScripts", "Storage"]


class MusubiTuner(Closed):
    """Where musubi-tuner lies, and the virtual environment that it runs in."""

    shapes: ClassVar[Shapes] = MACHINE

    path: DiskPath = Field(min_length=1, description="Folder of musubi-tuner.")
    venv: DiskPath | None = Field(
        None,
        min_length=1,
        description="Its virtual environment; by default `venv` or `.venv` in its folder.",
    )


class SdScripts(Closed):
    """Where sd-scripts lies, and the virtual environment that it runs in."""

    shapes: ClassVar[Shapes] = MACHINE

    path: DiskPath = Field(min_length=1, description="Folder of sd-scripts.")
    venv: DiskPath | None = Field(
        None,
        min_length=1,
        description="Its virtual environment; by default `venv` or `.venv` in its folder.",
    )


class PathMap(Closed):
    """One folder, as several systems name it."""

    shapes: ClassVar[Shapes] = PUBLICATION

    linux: str | None = Field(None, min_length=1, description="Its name under Linux.")
    windows: str | None = Field(None, min_length=1, description="Its name under Windows.")
    wsl: str | None = Field(None, min_length=1, description="Its name under WSL.")

    @model_validator(mode="after")
    def _two_names(self) -> Self:
        if sum(name is not None for name in (self.linux, self.windows, self.wsl)) < 2:
            raise ValueError("needs two of `linux`, `windows` and `wsl`")
        return self


class Publish(Closed):
    """What `publish_{run}` puts where."""

    shapes: ClassVar[Shapes] = PUBLICATION

    path: DiskPath = Field(
        "published", min_length=1, description="Folder that gets a folder for each published run."
    )
    path_maps: list[PathMap] = Field(
        [],
        description="Folders that other systems know by other names, so that scripts and TOML "
        "files name them rightly; drives under /mnt are known.",
    )


class Export(Closed):
    """Where `export_{run}` writes caches for ai-training."""

    shapes: ClassVar[Shapes] = PUBLICATION

    folder: DiskPath | None = Field(
        None,
        min_length=1,
        description="Folder that gets them, in a folder for each dataset; by default they lie "
        "beside the images.",
    )
    resolution: ResolutionField | None = Field(
        None, description="Which of a run's resolutions, where it has several."
    )
    overwrite: bool = Field(
        False, description="Replace files of such names that latentmake did not write."
    )


class Storage(Closed):
    """Where `store_{run}` puts finished caches, and `fetch_{run}` finds them."""

    shapes: ClassVar[Shapes] = MACHINE

    caches: Place = Field(
        pattern="^s3://", description="Folder of the archives: s3://bucket/folder."
    )
