"""Rules captions_*: write every text of a run, with its tokens, to a page and a JSONL file."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.report.captioned import CaptionsOrder
from latentmake.report.captions import write_captions

with logged(snakemake.log[0]) as say:
    order = CaptionsOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    write_captions(order, Path(snakemake.output.lines), Path(snakemake.output.page), say)
