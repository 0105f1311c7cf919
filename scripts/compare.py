"""Rules compare_*: write one page of the pictures of runs and folders, side by side."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.reports.comparison import compare

with logged(snakemake.log[0]) as say:
    compare(Path(snakemake.input.order), Path(snakemake.output.page), say)
