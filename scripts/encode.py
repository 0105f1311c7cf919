"""Rules encode_* and reuse_*: carry out orders of one model."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Not before: most of a job's imports, and Ctrl-C in the middle of them gets one line, too.
    from pathlib import Path

    from latentmake.backends import encoder_of
    from latentmake.caches.encode import carry_out
    from latentmake.caches.gpu import visible
    from latentmake.caches.lease import lease
    from latentmake.files.workspace import usable_cores
    from latentmake.plan.orders import Order

    carry_out(
        (Order.read(Path(path)) for path in snakemake.input.orders),
        say=say,
        threads=snakemake.threads,
        # A GPU waits for pictures, whatever `--cores` says.
        readers=min(8, usable_cores()) if visible() else 1,
        external=encoder_of,
        lease=lease,
    )
