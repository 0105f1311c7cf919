# Needs: work orders (.latentmake/orders), and the model where a rule has yet to make it.
# Makes: cache files; for bulk, one job a work order, with a receipt of what it did.

for order in SESSION.orders:

    rule:
        name:
            order.rule
        input:
            **SESSION.order_inputs(order),
        output:
            # The receipt first: Snakemake tries a rule's outputs in order when it looks for it.
            receipt=str(order.receipt),
            targets=order.outputs,
        log:
            order.log,
        conda:
            "../envs/encode.yaml"
        threads: workflow.cores
        script:
            "../scripts/encode.py"


# One cache file, asked for by its name: the definition of what a batch makes many of.


rule latents:
    input:
        unpack(partial(single_inputs, "resolution")),
    output:
        "cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors",
    log:
        "logs/latents/{dataset}/{model}/{resolution}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: workflow.cores
    script:
        "../scripts/encode.py"


rule text:
    input:
        unpack(partial(single_inputs, "text")),
    output:
        "cache/{dataset}/{model}/text/{stem}.text.safetensors",
    log:
        "logs/text/{dataset}/{model}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: workflow.cores
    script:
        "../scripts/encode.py"
