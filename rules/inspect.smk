# Needs: the plan.
# Makes: nothing that is declared; status_{run} prints the state of caches and of running builds (also
#        in runs/{run}/status.json), check_{run} a checklist of all that a run needs, verify_{run}
#        what is wrong with cache files (also in reports/verify_{run}.json, which Snakemake would
#        delete where the job fails), explain where a file comes from and why it is stale. They encode
#        nothing.

from latentmake.reports.explanation import EXPLANATION

for run in SESSION.runs:

    rule:
        name:
            f"status_{run}"
        input:
            order=ancient(SESSION.run_order(run, "status") or workflow.main_snakefile),
        log:
            f"logs/status/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/status.py"

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


rule explain:
    log:
        "logs/explain.log",
    localrule: True
    conda:
        "../envs/encode.yaml"
    params:
        found=str(EXPLANATION),
    script:
        "../scripts/explain.py"
