# Needs: to adopt, the plan, and caches that ai-training, musubi-tuner or sd-scripts made of a run's
#        images; to export, its lock.
# Makes: adopt_{run} makes cache files of what is stale and lies there; export_{run} writes files for
#        ai-training. Nothing is declared: what a job leaves out, the next build encodes.

for run in SESSION.runs:

    rule:
        name:
            f"adopt_{run}"
        input:
            order=ancient(SESSION.run_order(run, "adopt") or workflow.main_snakefile),
        log:
            f"logs/adopt/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        script:
            "../scripts/adopt.py"

    rule:
        name:
            f"export_{run}"
        input:
            lock=f"runs/{run}/dataset.lock",
            order=ancient(SESSION.run_order(run, "export") or workflow.main_snakefile),
        log:
            f"logs/export/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        script:
            "../scripts/export.py"
