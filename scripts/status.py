"""Rules status_*: print what the planner wrote down."""

import sys
from pathlib import Path

from latentmake.entry import logged

with logged(snakemake.log[0]):
    sys.stdout.write(Path(snakemake.params.status).read_text(encoding="utf-8"))
