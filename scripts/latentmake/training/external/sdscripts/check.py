"""The checklist before a training by sd-scripts: all that can be known in seconds."""

from __future__ import annotations

from pathlib import Path

from latentmake.errors import UserError
from latentmake.training.checks import Finding
from latentmake.training.external.result import rows_of
from latentmake.training.external.sdscripts.deploy import deployed
from latentmake.training.external.sdscripts.order import ManifestRow, SdScriptsOrder
from latentmake.training.external.sdscripts.preflight import preflight

__all__ = ["check", "data_finding"]


def check(order: SdScriptsOrder) -> list[Finding]:
    """Look at all that a training needs; relative paths are those of the working directory."""
    return [data_finding(order), *preflight(order)]


def data_finding(order: SdScriptsOrder) -> Finding:
    """Check what is trained on: images, captions and caches, and that no two share a name."""
    what = "images and caches"
    try:
        items = sum(1 for _ in rows_of(Path(order.manifest), ManifestRow))
        files = deployed(order)
    except UserError as error:
        return Finding(what, "failed", str(error))
    if not items:
        return Finding(what, "failed", "no item is left to train on")
    return Finding(what, "ok", f"{items} items, {len(files)} files")
