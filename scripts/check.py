"""Rules check_*: print the checklist of a run."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.reports.check_order import CheckOrder
from latentmake.reports.check_run import check_run
from latentmake.training.checks import passed
from latentmake.training.order import read_order

with logged(snakemake.log[0]):
    order = read_order(Path(snakemake.input.order), CheckOrder)
    passed(check_run(order), lambda text: sys.stdout.write(f"{text}\n"))
