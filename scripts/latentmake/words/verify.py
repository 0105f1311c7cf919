"""`latentmake verify`: cache files and trained weights that are damaged."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from latentmake.files.workspace import human
from latentmake.plan.build import alone
from latentmake.reports import verification
from latentmake.reports.verification import DAMAGED, UNEXPECTED, Finding, Verified
from latentmake.words.project import coloured, opened, printable


def verify(
    runs: Sequence[str] | None = None,
    repair: bool = False,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Read every cache file of runs and their trained weights, and name those that are damaged."""
    with opened(configfile, directory) as project, alone() if repair else contextlib.nullcontext():
        found = verification.verify(project.facts, project.run_names(runs), repair=repair)
    if as_json:
        findings = [
            {name: getattr(each, name) for name in ("path", "verdict", "reason", "done")}
            for each in found.findings
        ]
        typer.echo(json.dumps({**vars(found), "findings": findings}, indent=1))
    else:
        for line in (*map(_line, found.findings), *_summary(found)):
            typer.echo(line)
    if not repair and (does := _repair({x.verdict for x in found.findings if x.is_ours})):
        files = [word for file in configfile or () for word in ("-c", str(file))]
        command = shlex.join(["latentmake", "verify", *(runs or ()), *files, "--repair"])
        typer.echo(f"`{command}` {does}, and the next build makes them", err=True)
    if len(found.wrong) > found.repaired:
        raise typer.Exit(1)


def _repair(verdicts: set[str]) -> str:
    """Return what a repair does with files of some verdicts; "" without any."""
    if verdicts == {DAMAGED}:
        return "deletes these files"
    if verdicts == {UNEXPECTED}:
        return "moves these files to the store"
    return "deletes the damaged files and moves the others to the store" if verdicts else ""


def _line(each: Finding) -> str:
    """Return a finding in a line, whatever its file is called."""
    text = f"{coloured(each.verdict)}: {each.reason}" + (f"; {each.done}" if each.done else "")
    return printable(f"{each.path}: {text}".replace("\n", "\\n"))


def _summary(found: Verified) -> Iterator[str]:
    yield f"verified {found.files} cache files ({human(found.size)} in {found.seconds:.1f} s)"
    counts = Counter(each.verdict for each in found.wrong)
    kinds = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    yield f"{len(found.wrong)} wrong{f' ({kinds})' if kinds else ''}, {found.repaired} repaired"
    if edited := len(found.findings) - len(found.wrong):
        yield f"{edited} edited since: the next build encodes them again"
    if found.missing:
        yield f"{len(found.missing)} missing: the next build makes them"
