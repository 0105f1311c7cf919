"""Rule train: hand the run to its trainer, unless it is trained on just that."""

from pathlib import Path

from latentmake.backends import trainer_of
from latentmake.entry import logged

with logged(snakemake.log[0]):
    order = Path(snakemake.input.order)
    trainer_of(order).train(
        order,
        log=Path(snakemake.log[0]),
        receipt=Path(snakemake.output.receipt),
        threads=snakemake.threads,
        processes=max(1, snakemake.resources.gpu),
    )
