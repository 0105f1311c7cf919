"""Rules encode_*, latents and text: carry out a work order."""

from pathlib import Path

from latentmake.backends import encoder_of
from latentmake.caches.encode import carry_out
from latentmake.caches.gpu import lease
from latentmake.entry import logged
from latentmake.plan.orders import WorkOrder

with logged(snakemake.log[0]) as say:
    order = WorkOrder.read(Path(snakemake.input.order))
    # What a job declares besides its receipt was asked for by its name, and cannot be skipped.
    batch = [*snakemake.output] == [str(order.receipt)]
    carry_out(
        order,
        order.receipt,
        say=say,
        threads=snakemake.threads,
        may_skip=batch,
        alone=True,
        encoder=encoder_of(order),
        lease=lease,
    )
