"""Rule sample_wan: build the small Wan model that the sample of videos trains."""

from pathlib import Path

from demo.wan_bundle import build_tiny_wan
from latentmake.entry import logged

with logged(snakemake.log[0]):
    build_tiny_wan(Path(snakemake.output.marker).parent, threads=snakemake.threads)
