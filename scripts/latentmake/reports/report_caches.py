"""Caches of a run for its report: number, bytes, times and sizes of each part."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.lib import format as npy

from latentmake.errors import UserError
from latentmake.files.safetensors import read_head
from latentmake.layouts import kind_of
from latentmake.models.shapes import vae_factor
from latentmake.reports.report_order import PartReport, ReportOrder

__all__ = ["buckets_section", "caches_section"]

_LATENTS = "latents"
_IMAGE, _CLIP = 3, 4  # dimensions of an image's latents [C, h, w] and of a clip's [C, F, h, w]


def caches_section(order: ReportOrder) -> list[dict[str, Any]]:
    """Return a row for each part: counts as planned, bytes and times as they are now.

    What the same command has made since it was planned counts as fresh.
    """
    return [_row(part, order.planned) for part in order.parts]


def _row(part: PartReport, planned: float) -> dict[str, Any]:
    sizes, times, made = 0, [], 0
    for path in part.paths:
        try:
            stat = Path(path).stat()
        except OSError:
            continue
        sizes += stat.st_size
        times.append(stat.st_mtime)
        made += stat.st_ctime >= planned  # a link has the mtime of what it leads to
    stale = Counter(part.stale)
    made = min(made, stale.total())
    stale -= Counter([*stale.elements()][:made])
    return {
        "dataset": part.dataset,
        "part": part.part,
        "fresh": part.fresh + made,
        "stale": dict(stale),
        "orphans": part.orphans,
        "files": len(times),
        "bytes": sizes,
        "first": min(times, default=None),
        "last": max(times, default=None),
    }


def buckets_section(order: ReportOrder) -> list[dict[str, Any]]:
    """Return the sizes of latents in each part, by their headers: width, height, frames, number.

    Sizes are in pixels where the VAE's configuration tells how many a latent stands for; else, with
    `factor` 1, in latents. Files that are missing or damaged are not counted.
    """
    try:
        factor = vae_factor(order.contact.model.vae) or 1
    except UserError:
        factor = 1
    found = []
    for part in order.parts:
        if kind_of(part.part) != _LATENTS:
            continue
        sizes = Counter(filter(None, map(_size, part.paths)))
        rows = [
            [width * factor, height * factor, frames, count]
            for (width, height, frames), count in sorted(sizes.items())
        ]
        found.append({"dataset": part.dataset, "part": part.part, "sizes": rows, "factor": factor})
    return found


def _size(path: str) -> tuple[int, int, int] | None:
    """Return width, height and frames of a file's latents; None where no header tells."""
    try:
        if path.endswith(".npz"):
            shapes = _npz_shapes(path)
        else:
            shapes = {name: each.shape for name, each in read_head(path).tensors.items()}
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    for name, shape in shapes.items():
        if name.startswith(_LATENTS) and len(shape) in (_IMAGE, _CLIP):
            return shape[-1], shape[-2], shape[1] if len(shape) == _CLIP else 1
    return None


def _npz_shapes(path: str) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                version = npy.read_magic(member)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                found[name] = read(member)[0]
    return found
