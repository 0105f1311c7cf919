"""Script of the rule manifest: removes orphaned files and writes a run's manifest and lock."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # comes before any installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Imports stand here so that Ctrl-C during them prints one line instead of a traceback.
    from pathlib import Path

    from latentmake.plan.manifest import ManifestOrder
    from latentmake.runs.rows import write_manifest

    order = ManifestOrder.read(Path(snakemake.params.order))
    receipts = [Path(receipt) for receipt in snakemake.params.receipts]
    write_manifest(order, receipts, Path(snakemake.output.lock).parent, say)
