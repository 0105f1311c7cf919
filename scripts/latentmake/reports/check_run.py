"""Checklist of a run: caches, items, manifest. Nothing is encoded."""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.reports.check_order import CheckOrder, PartCounts
from latentmake.training.checks import Finding, of_faults

__all__ = ["check_run"]


def check_run(order: CheckOrder) -> Iterator[Finding]:
    """Check what a run needs but for its trainer."""
    yield from map(_part, order.parts)
    yield of_faults("items", order.faults, "none is faulty, as far as is known")
    if not order.current:
        note = "is not up to date: the next build writes it, and its files are checked then"
        yield Finding("manifest", "warning", note)


def _part(part: PartCounts) -> Finding:
    stale = dict(part.stale)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{part.fresh} fresh, {sum(stale.values())} stale{reasons}, {missing} missing"
    if part.orphans:
        note += f", {part.orphans} of items that are gone"
    doubtful = bool(part.stale or part.orphans)
    return Finding(f"caches: {part.name}", "warning" if doubtful else "ok", note)
