# Needs: the lock of a Wan run, and its order.
# Makes: check_{run} prints what stands between the run and its training; publish_{run} puts images,
#        caches, dataset TOML and scripts where the trainer's machine will find them.

WAN_RUNS = [run for run in SESSION.runs if SESSION.is_wan(run)]


def wan_order(run):
    """Return the order of a Wan run; it is written anew with each plan."""
    return lambda wildcards: SESSION.wan_order(run)


for run in WAN_RUNS:

    rule:
        name:
            f"check_{run}"
        input:
            lock=f"runs/{run}/dataset.lock",
            order=wan_order(run),
        log:
            f"logs/check/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/check.py"

    rule:
        name:
            f"publish_{run}"
        input:
            lock=f"runs/{run}/dataset.lock",
            order=wan_order(run),
        log:
            f"logs/publish/{run}.log",
        localrule: True
        conda:
            "../envs/train.yaml"
        script:
            "../scripts/publish.py"
