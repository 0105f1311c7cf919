# Needs: the lock of a run.
# Makes: export_{run} writes its caches as files for ai-training. Nothing is declared.

for run in SESSION.config.runs:

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
