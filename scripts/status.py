"""Rules status_*: print the status of a run, and write it as JSON."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.reports.status import status_text, write_status
from latentmake.reports.status_order import StatusOrder

with logged(snakemake.log[0]):
    order = StatusOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    write_status(order, Path("runs", order.run, "status.json"))
    sys.stdout.write(status_text(order))
