"""Rule train: hand the run to its trainer, unless it is trained on just that."""

from pathlib import Path

from latentmake import backends
from latentmake.entry import logged

with logged(snakemake.log[0]):
    order = Path(snakemake.input.order)
    backends.of_order(order).train(
        order,
        log=Path(snakemake.log[0]),
        receipt=Path(snakemake.output.receipt),
        threads=snakemake.threads,
        processes=max(1, snakemake.resources.gpu),
    )
