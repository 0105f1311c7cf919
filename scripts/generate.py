"""Rule generate: draw the clips of a run by its trained weights, with a page and an index."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from pathlib import Path

from latentmake import backends
from latentmake.entry import logged
from latentmake.reports.following import write_generated

with logged(snakemake.log[0]) as say:
    order = Path(snakemake.input.order)
    folder = backends.of_order(order).follow(
        order, "generate", log=Path(snakemake.log[0]), threads=snakemake.threads
    )
    write_generated(folder, Path(snakemake.output.receipt), say)
