# Needs: the lock of a run that musubi-tuner or sd-scripts trains, and its order.
# Makes: publish_{run} puts images, caches, dataset TOML and scripts where the trainer's machine will
#        find them.


def publication_inputs(run):
    """Return what a publication needs; without caches it is its order alone."""
    return lambda wildcards: SESSION.publication_inputs(run)


for run in SESSION.runs_that("publishes"):

    rule:
        name:
            f"publish_{run}"
        input:
            unpack(publication_inputs(run)),
        log:
            f"logs/publish/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/publish.py"
