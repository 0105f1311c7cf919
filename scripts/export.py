"""Rules export_*: write a run's caches as ai-training's files."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.export import ExportOrder, export

with logged(snakemake.log[0]) as say:
    order = ExportOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    export(order, say=say, threads=snakemake.threads)
