"""Rule archive: pack the cache files of one part."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.archives import pack

with logged(snakemake.log[0]):
    pack(Path(snakemake.input.order), Path(snakemake.output.archive))
