"""Rules adopt_*: adopt cache files of other programs."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.adoption_kinds import adopt_by

with logged(snakemake.log[0]) as say:
    adopt_by(Path(snakemake.input.order), say=say, threads=snakemake.threads)
