"""Rule train: hand the run to its trainer, unless it is trained on just that."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Here, so that Ctrl-C amid imports gets one line, too.
    from pathlib import Path

    from latentmake import backends
    from latentmake.training.process import run_lock

    order, receipt = Path(snakemake.params.order), Path(snakemake.output.receipt)
    with run_lock(receipt.parent, say):
        backends.of_order(order).train(
            order,
            log=Path(snakemake.log[0]),
            receipt=receipt,
            threads=snakemake.threads,
            processes=max(1, snakemake.resources.gpu),
        )
