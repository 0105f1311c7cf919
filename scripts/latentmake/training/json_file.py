"""Small JSON files of a training: its record, receipt and index of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake.files import atomic


class JsonFile(BaseModel):
    """A JSON file with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a file; None where it is missing or damaged."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        atomic.write(path, (self.model_dump_json(indent=2) + "\n").encode())
