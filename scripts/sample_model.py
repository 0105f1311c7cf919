"""Rule sample_model: build the small model that the sample trains."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.sample.bundle import build_tiny_bundle

with logged(snakemake.log[0]):
    build_tiny_bundle(Path(snakemake.output.marker).parent, threads=snakemake.threads)
