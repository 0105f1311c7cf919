"""Script of the rule train: hands the run to its trainer, unless its training is up to date."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # comes before any installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Imports stand here so that Ctrl-C during them prints one line instead of a traceback.
    from pathlib import Path

    from latentmake import backends
    from latentmake.trainers.process import run_lock

    order, receipt = Path(snakemake.params.order), Path(snakemake.output.receipt)
    with run_lock(receipt.parent, say):
        backends.of_order(order).train(
            order,
            log=Path(snakemake.log[0]),
            receipt=receipt,
            threads=snakemake.threads,
            processes=max(1, snakemake.resources.gpu),
        )
