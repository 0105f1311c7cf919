# Needs: orders (.latentmake/orders).
# Makes: cache files; for bulk, a job for the orders of one model. Declared are their receipts
#        alone, since Snakemake deletes what a failed job declares; and files asked for by name.

from latentmake import layouts

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
for kind, part in (("latents", RESOLUTION), ("text", f"{RESOLUTION}|{TEXT}")):

    rule:
        name:
            kind
        input:
            unpack(partial(single_inputs, CACHE_FILE)),
        output:
            CACHE_FILE,
        log:
            f"logs/{kind}/{{dataset}}/{{model}}/{{part}}{{ending}}/{{stem}}.log",
        wildcard_constraints:
            part=part,
            ending="|".join(map(re.escape, layouts.endings(kind))),
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        resources:
            **resources_of("encode"),
        script:
            "../scripts/encode.py"
