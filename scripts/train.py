"""Rule train: hand the run to its trainer, unless it is trained on just that."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.trainers.launch import train

with logged(snakemake.log[0]):
    train(
        Path(snakemake.input.order),
        log=Path(snakemake.log[0]),
        receipt=Path(snakemake.output.receipt),
        threads=snakemake.threads,
    )
