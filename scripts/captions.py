"""Rules captions_*: write every text of a run, with its tokens, to a page and a JSONL file."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.reports.captions import write_captions
from latentmake.reports.captions_order import CaptionsOrder

with logged(snakemake.log[0]) as say:
    order = CaptionsOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    write_captions(order, Path(snakemake.output.lines), Path(snakemake.output.page), say)
