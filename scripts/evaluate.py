"""Rule evaluate: compare trained weights with the base on items that did not train, on a page."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from pathlib import Path

from latentmake import backends
from latentmake.entry import logged
from latentmake.reports.following import write_evaluation

with logged(snakemake.log[0]) as say:
    order = Path(snakemake.input.order)
    folder = backends.of_order(order).follow(
        order, "evaluate", log=Path(snakemake.log[0]), threads=snakemake.threads
    )
    write_evaluation(folder, Path(snakemake.output.page), say)
