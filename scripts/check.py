"""Rules check_*: print the checklist of a run."""

import sys
from pathlib import Path

from latentmake import backends
from latentmake.entry import logged
from latentmake.reports.checklist import CheckOrder
from latentmake.training.checks import passed
from latentmake.training.image_checks import image_findings
from latentmake.training.order import read_order

with logged(snakemake.log[0]):
    order = read_order(Path(snakemake.input.order), CheckOrder)
    findings = order.findings
    if order.trainer is not None:
        trainer = Path(order.trainer)
        findings += backends.of_order(trainer).check(trainer, current=order.current)
    findings += image_findings(order.images)
    passed(findings, lambda text: sys.stdout.write(f"{text}\n"))
