"""`latentmake verify`: find damaged cache files and trained weights."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import typer

from latentmake.base.machine import human
from latentmake.commands.project import coloured, printable, run_names
from latentmake.pages import verification
from latentmake.pages.verification import DAMAGED, UNEXPECTED, Finding, Verified
from latentmake.plan.build import alone
from latentmake.plan.facts import Facts


def verify(
    facts: Facts,
    context: typer.Context,
    runs: Sequence[str] | None,
    repair: bool,
    as_json: bool,
) -> None:
    """Read every cache file of runs and their trained weights, and name those that are damaged."""
    # A build must not start while a repair deletes files.
    with alone() if repair else contextlib.nullcontext():
        result = verification.verify(facts, run_names(facts.config, runs), repair=repair)
    if as_json:
        findings = [
            {name: getattr(finding, name) for name in ("path", "verdict", "reason", "done")}
            for finding in result.findings
        ]
        typer.echo(json.dumps({**vars(result), "findings": findings}, indent=1))
    else:
        for line in (*map(_line, result.findings), *_summary(result)):
            typer.echo(line)
    repairable = {finding.verdict for finding in result.findings if finding.is_ours}
    if not repair and (does := _repair(repairable)):
        files = [word for file in context.params["configfile"] or () for word in ("-c", str(file))]
        command = shlex.join(["latentmake", "verify", *(runs or ()), *files, "--repair"])
        typer.echo(f"`{command}` {does}, and the next build makes them", err=True)
    if len(result.wrong) > result.repaired:
        raise typer.Exit(1)


def _repair(verdicts: set[str]) -> str:
    """Return the words for what a repair does with files of these verdicts; "" for no verdicts."""
    if verdicts == {DAMAGED}:
        return "deletes these files"
    if verdicts == {UNEXPECTED}:
        return "moves these files to the store"
    return "deletes the damaged files and moves the others to the store" if verdicts else ""


def _line(finding: Finding) -> str:
    """Return a finding as one line; the file name may contain newlines and invalid UTF-8."""
    text = f"{coloured(finding.verdict)}: {finding.reason}"
    if finding.done:
        text += f"; {finding.done}"
    return printable(f"{finding.path}: {text}".replace("\n", "\\n"))


def _summary(result: Verified) -> Iterator[str]:
    yield f"verified {result.files} cache files ({human(result.size)} in {result.seconds:.1f} s)"
    counts = Counter(finding.verdict for finding in result.wrong)
    kinds = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    yield f"{len(result.wrong)} wrong{f' ({kinds})' if kinds else ''}, {result.repaired} repaired"
    if edited := len(result.findings) - len(result.wrong):
        yield f"{edited} edited since: the next build encodes them again"
    if result.missing:
        yield f"{len(result.missing)} missing: the next build makes them"
