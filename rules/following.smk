# Needs: a run's trained weights, and an order where clips or figures are missing.
# Makes: runs/{run}/generated with clips, page and index; reports/evaluate_{run}.html
#        from metrics.json and clips in runs/{run}/evaluation. Declared is one file of each alone,
#        since Snakemake deletes what a job declares before it runs, and clips outlive a failure.

FOLLOWING = {
    "generate": "runs/{run}/generated.json",
    "evaluate": "reports/evaluate_{run}.html",
}

for word, made in FOLLOWING.items():

    rule:
        name:
            word
        input:
            unpack(following_inputs(word)),
        output:
            made,
        log:
            f"logs/{word}/{{run}}.log",
        conda:
            "../envs/train.yaml"
        threads: threads_of("train")
        resources:
            **resources_of("train"),
        params:
            word=word,
        script:
            "../scripts/following.py"

    for run in SESSION.runs_of_ours():

        rule:
            name:
                f"{word}_{run}"
            input:
                made.format(run=run),
