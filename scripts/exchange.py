"""Rules publish_*, export_* and clips_*: write what other programs read of a run."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # before any other installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Here, so that Ctrl-C amid imports gets one line, too.
    from pathlib import Path

    from latentmake.files.state_file import read_order

    order, word = Path(snakemake.input.order), snakemake.params.word
    if word == "publish":
        from latentmake import backends

        backends.of_order(order).publish(order, say)
    elif word == "export":
        from latentmake.exchange.export import ExportOrder, export

        exported = read_order(order, ExportOrder.model_validate_json)
        export(exported, say=say, threads=snakemake.threads)
    else:
        from latentmake.exchange.clip_files import ClipsOrder
        from latentmake.exchange.cut_clips import cut

        clips = read_order(order, ClipsOrder.model_validate_json)
        cut(clips, say=say, threads=snakemake.threads)
