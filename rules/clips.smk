# Needs: the plan, and the videos of a run.
# Makes: clips/{run}/*.npz and train.jsonl, on request alone: a run's clips as arrays for other
#        programs. Nothing is declared: what is up to date is kept. It encodes nothing.

for run in SESSION.config.runs:

    rule:
        name:
            f"clips_{run}"
        input:
            order=ancient(SESSION.run_order(run, "clips") or workflow.main_snakefile),
        log:
            f"logs/clips/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        threads: threads_of("encode")
        script:
            "../scripts/clips.py"
