"""Rule manifest: remove orphans, write a run's manifest and lock."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Here, so that Ctrl-C amid imports gets one line, too.
    from pathlib import Path

    from latentmake.plan.manifest import ManifestOrder
    from latentmake.training.rows import write_manifest

    order = ManifestOrder.read(Path(snakemake.params.order))
    receipts = [Path(receipt) for receipt in snakemake.params.receipts]
    write_manifest(order, receipts, Path(snakemake.output.lock).parent, say)
