"""Rules clips_*: cut a run's clips into .npz files."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from pathlib import Path

from latentmake.entry import logged
from latentmake.exchange.clip_files import ClipsOrder
from latentmake.exchange.cut_clips import cut

with logged(snakemake.log[0]) as say:
    order = ClipsOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    cut(order, say=say, threads=snakemake.threads)
