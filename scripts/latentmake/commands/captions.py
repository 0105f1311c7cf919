"""`latentmake captions`: write a page with the texts of a run, or caption files beside pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from latentmake.base import atomic
from latentmake.base.errors import ConfigError
from latentmake.commands.project import run_names, show_page
from latentmake.pages.captions import read_cards
from latentmake.pages.cards import page_data
from latentmake.pages.page import write_page
from latentmake.plan.facts import Facts


def captions(
    facts: Facts,
    run: str,
    stems: Sequence[str] | None = None,
    accept: Sequence[str] | None = None,
    undo: bool = False,
    edit: bool = False,
    open_page: bool = False,
    as_json: bool = False,
) -> None:
    """Write a page with every text of a run as it is encoded, its tokens, and what is cut off.

    With `accept`, `undo` and `edit`, write caption files beside pictures.
    """
    run_names(facts.config, [run])
    if bool(accept) + undo + edit > 1 or (stems and not (accept or undo)):
        what = "takes one of --accept, --undo and --edit; items are for the first two"
        raise ConfigError(what, where=f"captions {run}")
    if edit:
        from latentmake.commands import caption_server

        caption_server.edit(facts, run, open_page)
    elif accept or undo:
        from latentmake.commands import accepted_captions

        command = accepted_captions.undo if undo else accepted_captions.accept
        command(facts, run, [*(accept or ()), *(stems or ())], as_json)
    else:
        _write_page(facts, run, open_page, as_json)


def _write_page(facts: Facts, run: str, open_page: bool, as_json: bool) -> None:
    path = Path(f"reports/captions_{run}.html")
    cards = read_cards(facts, run)
    lines = "".join(cards.lines())
    atomic.write(path.with_suffix(".jsonl"), lines.encode())
    write_page(path, "cards", f"Captions of {run}", page_data(facts, run, cards, path))
    faulty = [f"faulty: {fault}" for fault in cards.faults]
    for line in [*cards.notes, *(faulty if as_json else ())]:
        typer.echo(line, err=as_json)
    if as_json:
        typer.echo(lines, nl=False)
        return
    for encoder in cards.encoders():
        cut = f"{encoder['cut']} of {encoder['texts']} texts are cut"
        typer.echo(f"{encoder['name']}: {cut}, the longest has {encoder['longest']} tokens")
    for line in faulty:
        typer.echo(line)
    show_page(path, opens=open_page)
