"""Rules check_*: print the checklist before a Wan training."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.musubi.check import check, checklist, refuse_failed
from latentmake.musubi.order import MusubiOrder

with logged(snakemake.log[0]):
    findings = check(MusubiOrder.read(Path(snakemake.input.order)))
    sys.stdout.write(checklist(findings) + "\n")
    refuse_failed(findings)
