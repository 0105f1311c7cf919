"""Rules verify_*: read every cache file of a run, and delete what is wrong if that is asked for."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.reports.verification import verify
from latentmake.reports.verify_order import VerifyOrder

with logged(snakemake.log[0]) as say:
    order = VerifyOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    verify(order, snakemake.threads, say)
