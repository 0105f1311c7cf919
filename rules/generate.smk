# Needs: a run's trained weights, and an order where clips are missing.
# Makes: runs/{run}/generated: clips, contact sheet, page and index; declared is the receipt alone,
#        since Snakemake deletes what a job declares before it runs, and clips outlive a failure.


rule generate:
    input:
        unpack(following_inputs("generate")),
    output:
        receipt="runs/{run}/generated.json",
    log:
        "logs/generate/{run}.log",
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    script:
        "../scripts/generate.py"


for run in SESSION.runs_that("generates"):

    rule:
        name:
            f"generate_{run}"
        input:
            f"runs/{run}/generated.json",
