# Needs: a run's lock, and a training order where the run is not trained on just that.
# Makes: trained weights and sample pictures in runs/{run}; declared is the receipt alone, since
#        Snakemake deletes what a job declares before it runs, and old weights outlive a failure.


rule train:
    input:
        unpack(Inputs("runs/{run}/dataset.lock", training_inputs)),
    output:
        receipt="runs/{run}/trained.json",
    log:
        "logs/train/{run}.log",
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    script:
        "../scripts/train.py"


for run in SESSION.config.runs:

    rule:
        name:
            f"train_{run}"
        input:
            final_target(run),
