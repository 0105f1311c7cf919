"""Script of the rules publish_*, export_* and clips_*: writes files for other programs."""

import sys

sys.path.insert(0, snakemake.scriptdir)  # comes before any installed copy of the package

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    # Imports stand here so that Ctrl-C during them prints one line instead of a traceback.
    from pathlib import Path

    from latentmake.base.state_file import read_order

    order, word = Path(snakemake.input.order), snakemake.params.word
    if word == "publish":
        from latentmake import backends

        backends.of_order(order).publish(order, say)
    elif word == "export":
        from latentmake.trainers.exchange.export import ExportOrder, export

        exported = read_order(order, ExportOrder.model_validate_json)
        export(exported, say=say, threads=snakemake.threads)
    else:
        from latentmake.trainers.exchange.clip_files import ClipsOrder
        from latentmake.trainers.exchange.cut_clips import cut

        clips = read_order(order, ClipsOrder.model_validate_json)
        cut(clips, say=say, threads=snakemake.threads)
