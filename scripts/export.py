"""Rules export_*: write a run's caches as another program names them."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.ai_training.export import export
from latentmake.exchange.ai_training.orders import ExportOrder

with logged(snakemake.log[0]) as say:
    order = ExportOrder.read(Path(snakemake.input.order))
    export(order, say=say, threads=snakemake.threads)
