# Needs: the lock of a run that musubi-tuner or sd-scripts trains, and its order.
# Makes: check_{run} prints what stands between a Wan run and its training; publish_{run} puts images,
#        caches, dataset TOML and scripts where the trainer's machine will find them.


def launch_order(run):
    """Return the order of a run of another trainer; it is written anew with each plan."""
    return lambda wildcards: SESSION.launch_order(run)


def publication_inputs(run):
    """Return what a publication needs; without caches it is its order alone."""
    return lambda wildcards: SESSION.publication_inputs(run)


for run in filter(SESSION.is_wan, SESSION.runs):

    rule:
        name:
            f"check_{run}"
        input:
            lock=f"runs/{run}/dataset.lock",
            order=launch_order(run),
        log:
            f"logs/check/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/check.py"


for run in filter(SESSION.is_launched, SESSION.runs):

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
