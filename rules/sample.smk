# Needs: nothing.
# Makes: models/tiny-sd and models/tiny-wan, the small Stable Diffusion and Wan that the samples
#        train; once, offline.


rule sample_model:
    output:
        marker=SAMPLE_MODEL_MARKER,
    log:
        "logs/sample_model.log",
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    script:
        "../scripts/sample_model.py"


rule sample_wan:
    output:
        marker=SAMPLE_WAN_MARKER,
    log:
        "logs/sample_wan.log",
    conda:
        "../envs/train.yaml"
    threads: threads_of("train")
    resources:
        **resources_of("train"),
    script:
        "../scripts/sample_wan.py"
