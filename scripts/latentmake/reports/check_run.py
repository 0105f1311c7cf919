"""The checklist of a run, whoever trains it: caches, items, trainer. Nothing is encoded."""

from __future__ import annotations

from collections.abc import Iterator

from latentmake.reports.check_order import CheckOrder, PartCounts
from latentmake.training.checks import Finding, of_faults, own
from latentmake.training.external.musubi import check as musubi
from latentmake.training.external.musubi.preflight import preflight as musubi_preflight
from latentmake.training.external.sdscripts import check as sdscripts
from latentmake.training.external.sdscripts.preflight import preflight as sdscripts_preflight

__all__ = ["check_run"]


def check_run(order: CheckOrder) -> Iterator[Finding]:
    """Check all that a run needs; relative paths are those of the working directory."""
    yield from map(_part, order.parts)
    yield of_faults("items", order.faults, "none is faulty, as far as is known")
    if not order.current:
        note = "is not up to date: the next build writes it, and its files are checked then"
        yield Finding("manifest", "warning", note)
    if order.musubi is not None and order.trained:
        found = musubi.check if order.current else musubi_preflight
        yield from found(order.musubi)
    elif order.musubi is not None and order.current:
        yield from musubi.data_findings(order.musubi)
    if order.sdscripts is not None:
        if order.current:
            yield sdscripts.data_finding(order.sdscripts)
        yield from sdscripts_preflight(order.sdscripts)
    if order.sd is not None:
        yield from own(order.sd)


def _part(part: PartCounts) -> Finding:
    stale = dict(part.stale)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{part.fresh} fresh, {sum(stale.values())} stale{reasons}, {missing} missing"
    if part.orphans:
        note += f", {part.orphans} of items that are gone"
    doubtful = bool(part.stale or part.orphans)
    return Finding(f"caches: {part.name}", "warning" if doubtful else "ok", note)
