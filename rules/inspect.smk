# Needs: the plan.
# Makes: nothing; status_{run} prints every stale target with its reason.

for run in SESSION.runs:

    rule:
        name:
            f"status_{run}"
        log:
            f"logs/status/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        params:
            status=str(SESSION.status_path(run)),
        script:
            "../scripts/status.py"
