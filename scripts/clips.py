"""Rules clips_*: cut a run's clips into .npz files."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.clip_files.cut import cut
from latentmake.exchange.clip_files.order import ClipsOrder

with logged(snakemake.log[0]) as say:
    order = ClipsOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    cut(order, say=say, threads=snakemake.threads)
