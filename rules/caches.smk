# Needs: work orders (.latentmake/orders), and the model where a rule has yet to make it.
# Makes: cache files; for bulk, one job a work order. Declared is its receipt alone, since Snakemake
#        deletes what a failed job declares; and the files that the command asks for by their names.

import re

from latentmake import layouts

CACHE_FILE = "cache/{dataset}/{model}/{part}/{stem}{ending}"

for order in SESSION.plan.orders:

    rule:
        name:
            order.rule
        input:
            **SESSION.order_inputs(order),
        output:
            receipt=str(order.receipt),
            named=SESSION.named(order),
        log:
            order.log,
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        resources:
            **resources_of("encode", order),
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
