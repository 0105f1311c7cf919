# Needs: nothing.
# Makes: models/tiny-sd, the small Stable Diffusion that the sample trains; once, offline.


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
