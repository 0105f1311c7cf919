"""Rule explain: print the explanation that the planner wrote down, and keep it as JSON."""

import sys
from pathlib import Path

from latentmake.entry import logged
from latentmake.files import atomic

with logged(snakemake.log[0]):
    found = Path(snakemake.params.found)
    sys.stdout.write(found.read_text(encoding="utf-8", errors="surrogateescape"))
    atomic.write(Path("reports/explain.json"), found.with_suffix(".json").read_bytes())
