# Needs: work orders (.latentmake/orders), and the model where a rule has yet to make it.
# Makes: cache files; for bulk, one job a work order, with a receipt of what it did.

LATENTS = "cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors"
TEXT = "cache/{dataset}/{model}/{variant}/{stem}.text.safetensors"
WAN_LATENTS = "cache/{dataset}/{model}/{resolution}/{stem}_wan.safetensors"
WAN_TEXT = "cache/{dataset}/{model}/{resolution}/{stem}_wan_te.safetensors"
NPZ_LATENTS = "cache/{dataset}/{model}/{resolution}/{stem}_{network}.npz"
NPZ_TEXT = "cache/{dataset}/{model}/{variant}/{stem}_{encoders}.npz"

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
        threads: threads_of("encode")
        resources:
            **resources_of("encode", order),
        script:
            "../scripts/encode.py"


# One cache file, asked for by its name: the definition of what a batch makes many of.


rule latents:
    input:
        unpack(partial(single_inputs, LATENTS)),
    output:
        LATENTS,
    log:
        "logs/latents/{dataset}/{model}/{resolution}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"


rule text:
    input:
        unpack(partial(single_inputs, TEXT)),
    output:
        TEXT,
    log:
        "logs/text/{dataset}/{model}/{variant}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"


rule wan_latents:
    input:
        unpack(partial(single_inputs, WAN_LATENTS)),
    output:
        WAN_LATENTS,
    log:
        "logs/latents/{dataset}/{model}/{resolution}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"


rule wan_text:
    input:
        unpack(partial(single_inputs, WAN_TEXT)),
    output:
        WAN_TEXT,
    log:
        "logs/text/{dataset}/{model}/{resolution}/{stem}.log",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"


rule npz_latents:
    input:
        unpack(partial(single_inputs, NPZ_LATENTS)),
    output:
        NPZ_LATENTS,
    log:
        "logs/latents/{dataset}/{model}/{resolution}/{stem}_{network}.log",
    wildcard_constraints:
        network="sd|sdxl|sd3|flux",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"


rule npz_text:
    input:
        unpack(partial(single_inputs, NPZ_TEXT)),
    output:
        NPZ_TEXT,
    log:
        "logs/text/{dataset}/{model}/{variant}/{stem}_{encoders}.log",
    wildcard_constraints:
        encoders="te_outputs|sd3_te|flux_te",
    conda:
        "../envs/encode.yaml"
    threads: threads_of("encode")
    resources:
        **resources_of("encode"),
    script:
        "../scripts/encode.py"
