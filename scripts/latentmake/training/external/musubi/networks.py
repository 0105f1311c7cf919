"""The networks that a Wan training starts from: tens of gigabytes, each of which is read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from latentmake import digest
from latentmake.config import Model
from latentmake.errors import ModelError

__all__ = ["networks_digest"]


def networks_digest(model: Model, file_digest: Callable[[Path], str] = digest.of_file) -> str:
    """Return the digest of the networks that are trained.

    Args:
        model: names them.
        file_digest: how a file's digest is found; the planner passes its memo's.

    Raises:
        ModelError: one is missing or cannot be read.
    """
    digests: list[list[str]] = []
    for key, place in (("dit", model.dit), ("dit_high_noise", model.dit_high_noise)):
        if place is None:
            continue
        path = Path(place)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        try:
            digests.append([file_digest(file) for file in files])
        except FileNotFoundError:
            files = []
        except OSError as error:
            raise ModelError(
                f"cannot be read ({error.strerror})",
                where=place,
                mend="check the file's permissions",
            ) from None
        if not files:
            raise ModelError(f"this `{key}` does not exist", where=place, mend="correct its path")
    return digest.of_value(digests)
