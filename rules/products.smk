# Needs: the lock of a run; an order of the plan where something is missing or not up to date.
# Makes: trained weights, their records, sample pictures and curves in runs/{run}; with the weights,
#        clips, page and index in runs/{run}/generated, and reports/evaluate_{run}.html from
#        metrics.json and clips in runs/{run}/evaluation. The rule that makes them has one file of
#        each as output, for training the receipt. The others are outputs of {word}_{run}, which has
#        nothing left to do: Snakemake removes the outputs of a job that runs and of one that fails.
#        For other programs, publish_{run}: images, caches, dataset TOML and scripts where the
#        trainer's machine will find them; export_{run}: the caches as files for ai-training;
#        clips_{run}: clips/{run}/*.npz and train.jsonl. These declare nothing: each keeps what is
#        up to date.

COLLECTED = {
    "train": SESSION.config.runs,
    **dict.fromkeys(FOLLOWING, SESSION.runs_of_ours()),
}
EXCHANGED = {
    "publish": SESSION.published_runs(),
    "export": SESSION.config.runs,
    "clips": SESSION.config.runs,
}


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


for word, run in ((word, run) for word in COLLECTED for run in COLLECTED[word]):

    rule:
        name:
            f"{word}_{run}"
        input:
            made(FOLLOWING.get(word, GRAPH.final(run)).format(run=run), run, word),
            results(run, "pages") if REPORTS and word == "train" else [],
        output:
            results(run, word),


for word, run in ((word, run) for word in EXCHANGED for run in EXCHANGED[word]):

    rule:
        name:
            f"{word}_{run}"
        input:
            unpack(Inputs("runs/{run}/dataset.lock", word, run)),
        log:
            f"logs/{word}/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        threads: 1 if word == "publish" else threads_of("encode")
        params:
            word=word,
        script:
            "../scripts/exchange.py"
