"""Script of the rules encode_* and reuse_*: carries out the orders of one model."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # comes before any installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Imports stand here so that Ctrl-C during them prints one line instead of a traceback.
    from pathlib import Path

    from latentmake.backends import encoder_of
    from latentmake.encode.gpu import lease
    from latentmake.encode.runner import carry_out
    from latentmake.plan.orders import Order

    carry_out(
        (Order.read(Path(path)) for path in snakemake.input.orders),
        say=say,
        threads=snakemake.threads,
        external=encoder_of,
        lease=lease,
    )
