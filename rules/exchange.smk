# Needs: an order of the plan; the lock of the run, for its caches.
# Makes: publish_{run}: images, caches, dataset TOML and scripts where the trainer's machine will find
#        them; export_{run}: the caches as files for ai-training; clips_{run}: clips/{run}/*.npz and
#        train.jsonl. Nothing is declared: each keeps what is up to date.

EXCHANGED = {
    "publish": SESSION.published_runs(),
    "export": SESSION.config.runs,
    "clips": SESSION.config.runs,
}

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
