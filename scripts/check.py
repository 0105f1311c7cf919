"""Rules check_*: print the checklist before a Wan training."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.musubi.check import check
from latentmake.musubi.order import MusubiOrder
from latentmake.trainers.checks import passed
from latentmake.trainers.order import read_order

with logged(snakemake.log[0]):
    order = read_order(Path(snakemake.input.order), MusubiOrder)
    passed(check(order), lambda text: sys.stdout.write(f"{text}\n"))
