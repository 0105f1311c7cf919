"""Rules prune_*: list files without a name in the configuration, or remove listed files."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.plan.prune_job import prune
from latentmake.plan.prune_order import PruneOrder

with logged(snakemake.log[0]) as say:
    order = PruneOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    sys.stdout.write(prune(order, say))
