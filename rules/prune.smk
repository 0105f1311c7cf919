# Needs: the caches of a dataset, and the list that was shown before where removal is confirmed.
# Makes: nothing; prune_{dataset} lists what no configuration names any more, and with
#        `--config confirm=true` removes what it has listed.

from latentmake.plan.prune_order import prunable

for dataset in prunable(SESSION.config):

    rule:
        name:
            f"prune_{dataset}"
        input:
            order=ancient(
                SESSION.run_order(dataset, "prune") or workflow.main_snakefile
            ),
        log:
            f"logs/prune/{dataset}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/prune.py"
