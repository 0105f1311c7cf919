"""Rules fetch_*: take from archives the cache files that are missing here."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.archives import unpack

with logged(snakemake.log[0]) as say:
    archives = [Path(archive) for archive in snakemake.input.archives]
    unpack(Path(snakemake.input.order), archives, say)
