"""Rules adopt_*: take over what another program encoded."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.ai_training.adopt import adopt
from latentmake.exchange.ai_training.orders import AdoptOrder

with logged(snakemake.log[0]) as say:
    order = AdoptOrder.read(Path(snakemake.input.order))
    adopt(order, say=say, threads=snakemake.threads)
