"""Script of the rules generate and evaluate: carries out an order and writes the result's page."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # comes before any installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Imports stand here so that Ctrl-C during them prints one line instead of a traceback.
    from pathlib import Path

    from latentmake import backends
    from latentmake.pages.following import write_evaluation, write_generated

    order, word = Path(snakemake.params.order), snakemake.params.word
    folder = backends.of_order(order).follow(
        order, word, log=Path(snakemake.log[0]), threads=snakemake.threads
    )
    write = write_generated if word == "generate" else write_evaluation
    write(folder, Path(snakemake.output[0]), say)
