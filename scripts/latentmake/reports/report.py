"""Page of a run: items, sizes, training, speed, history and provenance of its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.files import atomic
from latentmake.plan.build_history import HISTORY, read_history, versions
from latentmake.reports.page import page
from latentmake.reports.report_caches import buckets_section, caches_section
from latentmake.reports.report_items import items_section
from latentmake.reports.report_order import ReportOrder
from latentmake.reports.report_training import training_section

__all__ = ["write_report"]

_BUILDS = 200  # the last ones of the history


def write_report(order: ReportOrder, path: Path, say: Callable[[str], object]) -> None:
    """Write the page of a run; `say` receives what cannot be shown, and its size.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    run, caches = order.contact.run, caches_section(order)
    data: dict[str, Any] = {
        "run": run,
        "planned": order.planned,
        "caches": caches,
        "contact": items_section(order.contact, say),
        "buckets": buckets_section(order),
        "training": training_section(run, say),
        "speeds": [speed._asdict() for speed in order.speeds],
        "history": [asdict(build) for build in read_history(last=_BUILDS)],
        "provenance": _provenance(order),
    }
    text = page("report", f"Report of {run}", data).encode()
    atomic.write(path, text)
    files = sum(row["files"] for row in caches)
    say(f"{path}: {files} cache files, {len(text) / 1e6:.1f} MB; builds are in {HISTORY}")


def _provenance(order: ReportOrder) -> dict[str, Any]:
    return {
        "model": order.contact.model_name,
        "trainer": order.trainer,
        "datasets": {
            name: settings.model_dump(mode="json", exclude_defaults=True)
            for name, settings in order.contact.datasets.items()
        },
        "recipes": [
            {"name": name, "digest": digest.of_value(recipe) if recipe else "", "recipe": recipe}
            for name, recipe in order.recipes.items()
        ],
        "versions": versions(),
    }
