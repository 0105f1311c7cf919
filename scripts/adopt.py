"""Rules adopt_*: adopt ai-training's files."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.ai_training.adopt import adopt
from latentmake.exchange.ai_training.orders import AdoptOrder

with logged(snakemake.log[0]) as say:
    order = AdoptOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    adopt(order, say=say, threads=snakemake.threads)
