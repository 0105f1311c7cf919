# Needs: a run's trained weights, and an order where clips or figures are missing.
# Makes: runs/{run}/generated with clips, page and index; reports/evaluate_{run}.html
#        from metrics.json and clips in runs/{run}/evaluation. The rule that makes them has one file
#        of each as output; the others, which outlive a failure, are outputs of {word}_{run}.

for word, file in FOLLOWING.items():

    rule:
        name:
            word
        input:
            unpack(Inputs(GRAPH.final("{run}"), word)),
        output:
            file,
        log:
            f"logs/{word}/{{run}}.log",
        conda:
            "../envs/train.yaml"
        threads: threads_of("train")
        resources:
            **resources_of("train"),
        params:
            word=word,
            order=order_of(word),
        script:
            "../scripts/following.py"

    for run in SESSION.runs_of_ours():

        rule:
            name:
                f"{word}_{run}"
            input:
                made(file.format(run=run), run, word),
            output:
                results(run, word),
