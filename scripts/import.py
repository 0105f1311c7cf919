"""Rules import_*: a dataset file of another trainer as a configuration of ours."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.datasets_toml.importing import import_file
from latentmake.exchange.datasets_toml.order import ImportOrder

with logged(snakemake.log[0]) as say:
    order = ImportOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    made = import_file(order, say)
    sys.stdout.write(made.text)
