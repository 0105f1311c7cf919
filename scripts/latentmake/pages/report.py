"""Page of a run: its caches, its training and its items."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from latentmake.base.errors import UserError
from latentmake.base.machine import counted, human
from latentmake.formats.cachefile import shapes_in
from latentmake.layouts.layout import kind_of
from latentmake.models.files import vae_factor
from latentmake.pages.captions import read_cards
from latentmake.pages.cards import page_data
from latentmake.pages.following import training_section
from latentmake.pages.overview import Status, StatusRow, stale_items, status_of
from latentmake.pages.page import table, write_page
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan, faulty_items, members

_LATENTS = "latents"
_IMAGE, _CLIP = 3, 4  # number of dimensions: latents [C, h, w] of images, [C, F, h, w] of clips


def write_report(facts: Facts, plan: RunPlan, path: Path) -> Status:
    """Write the page of a run, and return its status; raises UserError."""
    cards = read_cards(facts, plan.name)
    faults = [*cards.faults, *chain(*faulty_items(facts, plan).values())]
    cards = cards._replace(faults=[*dict.fromkeys(faults)])
    stale = stale_items(plan)
    datasets = facts.config.runs[plan.name].datasets
    if prompts := sum(dataset not in datasets for dataset, _ in stale):
        cards.notes.append(f"Prompts that are not encoded yet: {prompts}.")
    data = page_data(facts, plan.name, cards, path, stale)
    status = status_of(facts, plan)
    files = sum(row.files for row in status.rows)
    size = human(sum(row.bytes for row in status.rows))
    stale_targets = counted(status.stale, "target")
    state = [f"{stale_targets} stale", "warn"] if status.stale else ["all fresh", "good"]
    data["facts"] += [
        ["Cache files", f"{files}, {size}"],
        ["State", *state],
        ["Written", time.strftime("%Y-%m-%d %H:%M")],
    ]
    trained = facts.config.runs[plan.name].trainer is not None
    data["training"] = training_section(plan.name) if trained else None
    data["tables"] = [_caches(status.rows), _buckets(facts, plan.name)]
    write_page(path, "cards", f"Report of {plan.name}", data)
    return status


def _caches(rows: list[StatusRow]) -> dict[str, Any]:
    words = "" if any(row.files for row in rows) else "Nothing is encoded yet."
    heads = ["dataset", "kind", ">fresh", "stale", ">orphaned", ">files", ">size"]
    lines = []
    for row in rows:
        stale = ", ".join(f"{count} {reason}" for reason, count in row.stale.items()) or "–"
        counts = (str(row.fresh), stale, str(row.orphans), str(row.files))
        lines.append([row.dataset, row.kind, *counts, human(row.bytes)])
    return table("caches", "Caches", words, heads, lines)


def _buckets(facts: Facts, name: str) -> dict[str, Any]:
    """Return a table of the sizes of latents, which are read from the headers of cache files.

    Sizes are in pixels if the VAE's configuration gives its scale factor, otherwise in latents.
    Missing and damaged files are not counted.
    """
    run = facts.config.runs[name]
    try:
        factor = vae_factor(facts.config.models[run.model].vae) or 1
    except UserError:
        factor = 1
    sizes: Counter[tuple[str, str, int, int, int]] = Counter()
    for item in members(facts, run, {}, {}):
        for part, targets in item.targets.items():
            if kind_of(part) == _LATENTS:
                present = filter(None, (_size(path) for path, _ in targets))
                sizes.update((item.dataset, part, *size) for size in present)
    most = max(sizes.values(), default=1)
    rows: list[list[str | float]] = []
    for (dataset, part, width, height, frames), count in sorted(sizes.items()):
        size = f"{width * factor} × {height * factor}" + (f" × {frames}" if frames > 1 else "")
        rows.append([dataset, part, size, str(count), count / most])
    clips = " × frames of latents" if any(key[-1] > 1 for key in sizes) else ""
    unit = "pixels" if factor > 1 else "latents"
    words = f"Sizes as they train, in {unit}: width × height{clips}."
    heads = ["dataset", "resolution", "size", ">items", ""]
    title = "Resolutions and buckets"
    return table("buckets", title, words if sizes else "No latents yet.", heads, rows)


def _size(path: str) -> tuple[int, int, int] | None:
    """Return width, height and frames of a file's latents; None if its header cannot be read."""
    try:
        for name, shape in shapes_in(path).items():
            if name.startswith(_LATENTS) and len(shape) in (_IMAGE, _CLIP):
                return shape[-1], shape[-2], shape[1] if len(shape) == _CLIP else 1
    except (OSError, ValueError):
        pass
    return None
