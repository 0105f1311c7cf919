"""Tables for people: as wide as they are, so that `grep` finds whole rows in a pipe; pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 10_000  # characters


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> None:
    """Print rows under their headers; the columns of `numbers` are aligned to the right."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        side = "right" if header in numbers else "left"
        shown.add_column(header, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*map(Text, row))
    Console(width=_WIDE, soft_wrap=True).print(shown)


def show_page(path: Path, *, open_page: bool) -> None:
    """Print the path of a page that was written, and open it in a browser where asked to."""
    typer.echo(path)
    if open_page:
        typer.launch(path.absolute().as_uri())
