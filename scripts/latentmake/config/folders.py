"""Folders of images that are compared with each other or with the sample pictures of runs."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from latentmake.config.fields import Closed, DiskPath, place
from latentmake.config.shapes import MACHINE, Shapes

__all__ = ["Folder", "FolderField"]


def _on_disk(path: str) -> str:
    if path.lower().startswith("s3:"):
        raise ValueError("should be a folder on disk: images on S3 cannot be compared")
    return path


class Folder(Closed):
    """A folder of images to look at, with those in its sub-folders."""

    shapes: ClassVar[Shapes] = MACHINE

    path: Annotated[DiskPath, AfterValidator(_on_disk)] = Field(min_length=1)
    """Folder of the images."""


FolderField = Annotated[Folder, BeforeValidator(place, json_schema_input_type=str | Folder)]
