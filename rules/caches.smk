# Needs: orders (.latentmake/orders).
# Makes: cache files; for bulk, a job for the orders of one model. Declared are their receipts
#        alone, since Snakemake deletes what a failed job declares; and files asked for by name.

CACHE_FILE = "cache/{dataset}/{model}/{part}/{stem}{ending}"

for job in SESSION.plan.jobs:

    rule:
        name:
            job.rule
        input:
            orders=[str(order.path) for order in job.orders],
        output:
            receipts=job.receipts,
            named=SESSION.named(job),
        log:
            job.log,
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        resources:
            **resources_of("encode", job),
        script:
            "../scripts/encode.py"


# One cache file, asked for by its name: the definition of what a batch makes many of.
rule cache_file:
    input:
        unpack(partial(single_inputs, CACHE_FILE)),
    output:
        CACHE_FILE,
    log:
        "logs/caches/{dataset}/{model}/{part}{ending}/{stem}.log",
    wildcard_constraints:
        part=f"{RESOLUTION}|{TEXT}",
        ending=r"\.safetensors|\.npz",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"
