"""Rules generate and evaluate: carry out their order, and write the pages of the results."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Here, so that Ctrl-C amid imports gets one line, too.
    from pathlib import Path

    from latentmake import backends
    from latentmake.reports.following import write_evaluation, write_generated

    order, word = Path(snakemake.params.order), snakemake.params.word
    folder = backends.of_order(order).follow(
        order, word, log=Path(snakemake.log[0]), threads=snakemake.threads
    )
    write = write_generated if word == "generate" else write_evaluation
    write(folder, Path(snakemake.output[0]), say)
