# Needs: a run's lock, and a training order where the run is not trained on just that.
# Makes: trained weights, their records, sample pictures and curves in runs/{run}. The rule that
#        trains has the receipt as output; the others are outputs of train_{run}, which has nothing
#        left to do: Snakemake removes the outputs of a job that runs and of one that fails.


rule train:
    input:
        unpack(Inputs("runs/{run}/dataset.lock", "train")),
    output:
        receipt="runs/{run}/trained.json",
    log:
        "logs/train/{run}.log",
    benchmark:
        "benchmarks/train/{run}.tsv"
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    params:
        order=order_of("train"),
    script:
        "../scripts/train.py"


for run in SESSION.config.runs:

    rule:
        name:
            f"train_{run}"
        input:
            made(GRAPH.final(run), run, "train"),
            results(run, "pages") if REPORTS else [],
        output:
            results(run, "train"),
