"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the Markdown of a table."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])
