"""Rule sample_model: build the small model that the sample trains."""

from pathlib import Path

from demo.bundle import build_tiny_bundle
from latentmake.entry import logged

with logged(snakemake.log[0]):
    build_tiny_bundle(Path(snakemake.output.marker).parent, threads=snakemake.threads)
