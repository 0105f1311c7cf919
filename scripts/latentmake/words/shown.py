"""Tables and values for people: as wide as they are, so that `grep` finds whole rows; pages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import typer
import yaml
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


def show_values(values: object, *, as_json: bool) -> None:
    """Print plain values as JSON, or as YAML for people."""
    if as_json:
        typer.echo(json.dumps(values, indent=1))
    else:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=_WIDE)
        typer.echo(text, nl=False)


def printable(line: str) -> str:
    """Return a line in which bytes of a file name that are not UTF-8 are escaped."""
    return line.encode("utf-8", "backslashreplace").decode()


def show_page(path: Path, *, open_page: bool) -> None:
    """Print the path of a page that was written, and open it in a browser where asked to."""
    typer.echo(path)
    if open_page:
        typer.launch(path.absolute().as_uri())
