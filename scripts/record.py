"""Rules record_*: write down which archives hold a run's caches."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.archives import write_record

with logged(snakemake.log[0]):
    write_record(Path(snakemake.input.order), Path(snakemake.output.record[0]))
