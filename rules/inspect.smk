# Needs: the plan.
# Makes: nothing that is declared; check_{run} prints a checklist of all that a run needs, verify_{run}
#        what is wrong with cache files (also in reports/verify_{run}.json, which Snakemake would
#        delete where the job fails). They encode nothing.

for run in SESSION.runs:

    rule:
        name:
            f"check_{run}"
        input:
            order=ancient(SESSION.run_order(run, "check") or workflow.main_snakefile),
        log:
            f"logs/check/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/check.py"

    rule:
        name:
            f"verify_{run}"
        input:
            order=ancient(SESSION.run_order(run, "verify") or workflow.main_snakefile),
        log:
            f"logs/verify/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        threads: workflow.resource_settings.cores or 1
        script:
            "../scripts/verify.py"
