"""`latentmake verify`: find damaged cache files and trained weights."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Sequence

import typer

from latentmake.base.machine import human
from latentmake.commands.project import coloured, print_json, printable, run_names
from latentmake.pages import verification
from latentmake.pages.verification import DAMAGED, EDITED, UNEXPECTED, Finding
from latentmake.plan.build_locks import alone
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
        findings, missing, figures = verification.verify(
            facts, run_names(facts.config, runs), repair=repair
        )
    wrong = [finding for finding in findings if finding.verdict != EDITED]
    if as_json:
        values = [
            {name: getattr(finding, name) for name in ("path", "verdict", "reason", "done")}
            for finding in findings
        ]
        print_json({**figures, "missing": missing, "findings": values})
    else:
        for finding in findings:
            typer.echo(_line(finding))
        size, seconds = human(figures["size"]), figures["seconds"]
        typer.echo(f"verified {figures['files']} cache files ({size} in {seconds:.1f} s)")
        counts = Counter(finding.verdict for finding in wrong)
        kinds = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
        kinds = f" ({kinds})" if kinds else ""
        typer.echo(f"{len(wrong)} wrong{kinds}, {figures['repaired']} repaired")
        if edited := len(findings) - len(wrong):
            typer.echo(f"{edited} edited since: the next build encodes them again")
        if missing:
            typer.echo(f"{len(missing)} missing: the next build makes them")
    repairable = {finding.verdict for finding in findings if finding.is_ours}
    if not repair and (does := _repair(repairable)):
        files = [word for file in context.params["configfile"] or () for word in ("-c", str(file))]
        command = shlex.join(["latentmake", "verify", *(runs or ()), *files, "--repair"])
        typer.echo(f"`{command}` {does}, and the next build makes them", err=True)
    if len(wrong) > figures["repaired"]:
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
