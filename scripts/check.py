"""Rules check_*: print the checklist before a Wan training."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.musubi.check import check, checklist, refuse_failed
from latentmake.musubi.order import MusubiOrder
from latentmake.trainers.order import read_order

with logged(snakemake.log[0]):
    findings = check(read_order(Path(snakemake.input.order), MusubiOrder))
    sys.stdout.write(checklist(findings) + "\n")
    refuse_failed(findings)
