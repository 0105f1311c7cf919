# Needs: orders (.latentmake/orders), and the images and captions of datasets.
# Makes: cache files. One job makes those of many items, and has their receipts as output. A stale
#        file waits for that of its job, and its own rule has nothing left to do: Snakemake removes
#        the outputs of a job that runs and of one that fails, so cache files are outputs of none.

RESOLUTION = r"\d+(?:x\d+)?"
LATENTS = "cache/{dataset}/{model}/{resolution}/{stem}{ending}"
CAPTION = "cache/{dataset}/captions/{captioner}/{stem}.json"
EMBEDDING = "cache/{dataset}/{model}/{text}/{stem}{ending}"

for job in SESSION.plan.jobs:

    rule:
        name:
            job.rule
        input:
            orders=GRAPH.order_paths(job.orders),
            captions=job.awaits,
        output:
            receipts=job.receipts,
        log:
            job.log,
        benchmark:
            f"benchmarks/{job.log[5:-4]}.tsv"
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        resources:
            **resources_of("encode", job),
        script:
            "../scripts/encode.py"


rule captions:
    input:
        unpack(Inputs("image of {stem}", "cache", CAPTION)),
    output:
        CAPTION,
    wildcard_constraints:
        captioner=r"[^/]+",
        stem=".+?",
    threads: 0


rule latents:
    input:
        unpack(Inputs("image of {stem}", "cache", LATENTS)),
    output:
        LATENTS,
    wildcard_constraints:
        resolution=RESOLUTION,
        stem=".+?",
        ending=GRAPH.ending("latents"),
    threads: 0


rule text:
    input:
        unpack(Inputs("caption of {stem}", "cache", EMBEDDING)),
    output:
        EMBEDDING,
    wildcard_constraints:
        text=rf"text(?:\.\d+(?:@{RESOLUTION})?)?|{RESOLUTION}",
        stem=".+?",
        ending=GRAPH.ending("text"),
    threads: 0
