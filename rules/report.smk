# Needs: the plan, the model's tokenizers, and whatever caches and results of a run there are.
# Makes: reports/report_{run}.html, on request alone: a run's items, sizes, training, speed, history
#        and provenance. It encodes nothing, and waits for what the same command makes of the run;
#        `--report` of Snakemake contains the same page.

from latentmake.plan.targets import is_training_asked, kinds_built


def made_beside(run):
    """Return the results of a run that the same command makes."""
    if is_training_asked(run, ASKED.targets):
        return final_target(run)
    return SESSION.receipts(run, *kinds_built(run, ASKED.targets))


for run in SESSION.runs:

    rule:
        name:
            f"report_{run}"
        input:
            order=SESSION.run_order(run, "report") or workflow.main_snakefile,
            made=made_beside(run),
        output:
            page=report(
                f"reports/report_{run}.html",
                category="Runs",
                labels={"run": run},
            ),
        log:
            f"logs/report/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/report.py"
