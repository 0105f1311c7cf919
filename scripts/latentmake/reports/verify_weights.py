"""Comparison of a run's trained weights with the digests in the record of their training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from latentmake import digest
from latentmake.plan.parts import run_folder
from latentmake.reports.verify_findings import WEIGHTS, Finding
from latentmake.training.json_file import JsonFile

__all__ = ["changed_weights"]


class _Record(JsonFile, extra="ignore"):
    """The part of a training's record that every trainer writes; empty in earlier releases."""

    files: dict[str, str] = Field({})


def changed_weights(run: str) -> Iterator[Finding]:
    """Yield a finding for each file of trained weights that is not as its training wrote it.

    Missing files are no finding: the next training makes them.
    """
    folder = run_folder(run)
    record = _Record.read(folder / "training.json") or _Record()
    for name, expected in record.files.items():
        path = folder / name
        try:
            if digest.of_file(path) == expected:
                continue
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Finding(str(path), "unreadable", f"cannot be read ({error.strerror})")
            continue
        # An external trainer's own output is the same file, and would be taken again.
        others = [str(other) for other in _other_names(path, folder)]
        deleted = " and ".join([*others, str(folder / "training.json")])
        reason = (
            "changed since they were trained; restore the file from a copy, or delete "
            f"{deleted} and run `snakemake train_{run}`: the weights are then written from the "
            "last checkpoint, or trained again where there is none"
        )
        yield Finding(str(path), WEIGHTS, reason)


def _other_names(path: Path, folder: Path) -> Iterator[Path]:
    if path.stat().st_nlink > 1:
        found = (each for each in folder.rglob("*.safetensors") if each != path)
        yield from sorted(each for each in found if each.samefile(path))
