"""Rules report_*: write the page of a run."""

from pathlib import Path

from latentmake.entry import logged

with logged(snakemake.log[0]) as say:
    from latentmake.reports.report import write_report
    from latentmake.reports.report_order import ReportOrder

    order = ReportOrder.model_validate_json(Path(snakemake.input.order).read_bytes())
    write_report(order, Path(snakemake.output.page), say)
