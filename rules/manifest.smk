# Needs: the receipts of a run's batch jobs, and a manifest order where something has changed.
# Makes: runs/{run}/manifest.jsonl, what a run trains on; runs/{run}/dataset.lock, one digest of it.


rule manifest:
    input:
        unpack(Inputs("cache/{dataset}/{model}/...", "manifest")),
        ancient(commandline.kept(ASKED)),
    output:
        manifest="runs/{run}/manifest.jsonl",
        lock="runs/{run}/dataset.lock",
    log:
        "logs/manifest/{run}.log",
    localrule: True
    conda:
        "../envs/encode.yaml"
    params:
        order=order_of("manifest"),
        receipts=lambda wildcards, input: GRAPH.receipts(wildcards.run),
    script:
        "../scripts/manifest.py"


for run in SESSION.config.runs:

    rule:
        name:
            f"caches_{run}"
        input:
            f"runs/{run}/dataset.lock",

    for kind in ("captions", "latents", "text"):

        rule:
            name:
                f"{kind}_{run}"
            input:
                GRAPH.files(run, kind),
                # Without any input, Snakemake would run it.
                GRAPH.receipts(run, kind) or ancient(workflow.main_snakefile),
