# Needs: a run's trained weights, and an order where results are missing.
# Makes: reports/evaluate_{run}.html, from metrics.json and clips in runs/{run}/evaluation; declared
#        is the page alone, since Snakemake deletes what a job declares before it runs.


rule evaluate:
    input:
        unpack(following_inputs("evaluate")),
    output:
        page="reports/evaluate_{run}.html",
    log:
        "logs/evaluate/{run}.log",
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    script:
        "../scripts/evaluate.py"


for run in SESSION.runs_that("evaluates"):

    rule:
        name:
            f"evaluate_{run}"
        input:
            f"reports/evaluate_{run}.html",
