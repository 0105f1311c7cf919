"""Rules publish_*: put what a training needs where the trainer's machine will find it."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from pathlib import Path

from latentmake import backends
from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    order = Path(snakemake.input.order)
    backends.of_order(order).publish(order, say)
